"""Checks of shapes: results are as the op's schema and fake function say, whatever strides the arguments have."""

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from dlinfer.conformance.case import Case, Failed, mapped


def schema(case: Case) -> None:
    """Check that a call returns as many results as the schema says, each a tensor on the device."""
    args = case.fresh()
    returned = case.call(args)
    returns = case.op.overload._schema.returns
    results = _listed(returned)
    is_list = [str(result.type) for result in returns] == ["List[Tensor]"]
    if len(results) != len(returns) and not is_list:
        raise Failed(f"the call returns {len(results)} results, but the schema has {len(returns)}")
    for number, result in enumerate(results):
        if not isinstance(result, Tensor):
            raise Failed(f"result {number} is {type(result).__name__}, not a tensor")
    case.subject.check_device(results)


def fake(case: Case) -> None:
    """Check that real results have the shapes, dtypes and strides of the fake function's results."""
    expected = _by_fakes(case, case.fresh())
    actual = _described(case.call(case.fresh()))
    if actual != expected:
        raise Failed(f"the call returns {_text(actual)}, but the fake function returns {_text(expected)}")


def turned(case: Case) -> None:
    """Check that inputs with reversed strides give the same values, in results with the fake function's strides."""
    args = _turned(case, case.fresh())
    returned = case.call(args)
    expected = _by_fakes(case, _turned(case, case.fresh()))
    actual = _described(returned)
    if actual != expected:
        raise Failed(f"the call returns {_text(actual)}, but the fake function returns {_text(expected)}")
    case.compare(args, returned, case.expected())


def _turned(case: Case, args: list[Any]) -> list[Any]:
    if case.aliased:
        return args
    return [
        arg if name in case.op.mutates else mapped(_reversed, arg)
        for name, arg in zip(case.op.parameters, args, strict=True)
    ]


def _reversed(tensor: Tensor) -> Tensor:
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def _by_fakes(case: Case, args: list[Any]) -> list[tuple[Any, ...]]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, args)
        return _described(case.op.overload(*fakes))


def _listed(returned: Any) -> list[Any]:
    if returned is None:
        return []
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def _described(returned: Any) -> list[tuple[Any, ...]]:
    """Return (shape, dtype, strides of dimensions larger than 1, device type) of each result."""
    return [
        (
            tuple(result.shape),
            result.dtype,
            tuple(step for size, step in zip(result.shape, result.stride(), strict=True) if size > 1)
            if result.numel()
            else (),
            result.device.type,
        )
        for result in _listed(returned)
    ]


def _text(described: list[tuple[Any, ...]]) -> str:
    parts = [
        f"{str(dtype).removeprefix('torch.')}{list(shape)} strides {strides} on {device}"
        for shape, dtype, strides, device in described
    ]
    return "; ".join(parts) or "nothing"


def symbolic(case: Case) -> None:
    """Check that the fake function takes symbolic sizes and returns the right sizes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    args = case.fresh()  # real tensors: code that packs weights reads values
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, args)
        symbols = _listed(case.op.overload(*fakes))
        shapes = [tuple(int(size) for size in result.shape) for result in symbols]
    real = [tuple(result.shape) for result in _listed(case.call(case.fresh()))]
    if shapes != real:
        raise Failed(f"the fake function returns sizes {shapes}, but the real call returns sizes {real}")
