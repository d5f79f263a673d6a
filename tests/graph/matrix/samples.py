"""Samples of torch's op database, copied exactly and compared strictly."""

import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

# The database wraps random ops in a function that seeds, which Dynamo does not trace; ``seed`` does that here.
database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

OPS = {op.full_name: op for op in database.op_db}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

UNDEFINED_VALUES = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Ops whose result is memory as it was found: only its form can be compared."""

Call = Callable[[Any, tuple, dict], Any]


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # the database's generators draw from numpy's global state


def samples(name: str, dtype: str) -> Iterator[Any]:
    """The op's samples on the CPU; none where the op does not take the dtype."""
    op = OPS[name]
    if DTYPES[dtype] not in op.supported_dtypes("cpu"):
        return
    seed()
    yield from op.sample_inputs("cpu", DTYPES[dtype], requires_grad=False)


def copy(value: Any) -> Any:
    """A deep copy that keeps sizes, strides, offsets and which tensors share memory; nothing requires grad."""
    storages: dict[int, torch.UntypedStorage] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout != torch.strided or leaf.is_conj() or leaf.is_neg():
            return leaf.detach().clone()
        source = leaf.untyped_storage()
        twin = storages.setdefault(source._cdata, source.clone())
        made = torch.empty(0, dtype=leaf.dtype)
        return made.set_(twin, leaf.storage_offset(), leaf.size(), leaf.stride())

    return pytree.tree_map(one, value)


_TEMPLATE = "def call(input, args, kwargs):\n    return op(input, *args, **kwargs)\n"


_numbers = itertools.count()


def fresh_call(op: Callable[..., Any]) -> Call:
    """A function that calls ``op``, with a code object and a file name of its own.

    Dynamo keeps its cache and its limits by code object, and which sizes it saw vary by file name and line.
    """
    scope: dict[str, Any] = {"op": op}
    exec(compile(_TEMPLATE, f"<sample {next(_numbers)}>", "exec"), scope)
    call = scope["call"]
    assert isinstance(call, types.FunctionType)
    return call


def difference(got: Any, want: Any, *, values: bool = True) -> tuple[str, str]:
    """How two results differ: ``("equal", "")``, ``("close", detail)`` or ``("wrong", detail)``.

    Equal is equal bits, NaNs of any payload included; close is within ``torch.testing``'s tolerance of the dtype.
    """
    mine, mine_spec = pytree.tree_flatten(got)
    theirs, theirs_spec = pytree.tree_flatten(want)
    if len(mine) != len(theirs) or mine_spec != theirs_spec:
        return "wrong", f"a result of form {mine_spec}, not {theirs_spec}"
    worst = ("equal", "")
    for one, other in zip(mine, theirs, strict=True):
        kind, detail = _leaf_difference(one, other, values)
        if kind == "wrong":
            return kind, detail
        if kind == "close":
            worst = kind, detail
    return worst


def _leaf_difference(got: Any, want: Any, values: bool) -> tuple[str, str]:
    if not isinstance(want, torch.Tensor):
        same = type(got) is type(want) and (got == want or (got != got and want != want))
        return ("equal", "") if same else ("wrong", f"{got!r}, not {want!r}")
    if not isinstance(got, torch.Tensor):
        return "wrong", f"a {type(got).__name__}, not a tensor"
    form, expected = _form(got), _form(want)
    if form != expected:
        return "wrong", f"{form}, not {expected}"
    if not values or _equal(got, want):
        return "equal", ""
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError as error:
        return "wrong", " ".join(str(error).split())[:300]
    return "close", "values differ within tolerance"


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided and tensor.numel() > 1 else ()
    meaning = tuple(stride for stride, size in zip(strides, tensor.shape, strict=False) if size > 1)
    return (tensor.dtype, tuple(tensor.shape), tensor.layout, meaning)


def _equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.layout != torch.strided:
        return got.layout == want.layout and torch.equal(got.to_dense(), want.to_dense())
    if got.is_complex():  # not every complex dtype can be compared, its parts can
        return _equal(torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj()))
    if torch.equal(got, want):
        return True
    if not got.is_floating_point():
        return False
    return bool(((got == want) | (got.isnan() & want.isnan())).all())
