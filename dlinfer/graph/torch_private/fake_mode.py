"""Fake tensors and their modes, and tracing of functions on fakes."""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["FakeTensor", "FakeTensorMode", "is_traceable_wrapper_subclass"]


def storage_id(fake: torch.Tensor) -> int:
    """Return the identity of a fake's storage, which all views of one memory share."""
    return fake.untyped_storage()._cdata


def mode_of(values: Iterable[object]) -> FakeTensorMode:
    """Return the fake mode of the first fake tensor among ``values``. There must be a fake tensor."""
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def environment_of(mode: FakeTensorMode) -> ShapeEnv:
    """Return the ShapeEnv of a fake mode, which holds the mode's symbols. The mode must have a ShapeEnv."""
    assert mode.shape_env is not None
    return mode.shape_env


def fresh_mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def strict_mode() -> FakeTensorMode:
    """Return a fake mode with symbols of its own. It runs no real kernel and takes no real tensor."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False, allow_fallback_kernels=False)


def with_symbols(mode: FakeTensorMode, example: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """Return a fake of ``example`` with a new symbol for each size in ``dims``. The other sizes are numbers."""
    kinds = [DimDynamic.STATIC] * example.dim()
    for dim in dims:
        kinds[dim] = DimDynamic.DYNAMIC
    return mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(kinds))


@contextmanager
def symbolic(mode: FakeTensorMode) -> Generator[None]:
    """Run the ops in the ``with`` block on fakes of ``mode``, with torch's Python dispatcher.

    Without the Python dispatcher, ops composed in C++ (``pad``) would specialize symbolic sizes.
    """
    with torch.no_grad(), mode, enable_python_dispatcher():
        yield


@contextmanager
def _admits_real_constants(mode: FakeTensorMode) -> Generator[None]:
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def trace_coarse(
    function: Callable[..., object],
    fakes: Sequence[object],
    mode: FakeTensorMode,
    *,
    decomposed: bool = False,
) -> fx.GraphModule:
    """Trace ``function`` on fake inputs before dispatch, into ATen and custom ops.

    ``linear``, ``layer_norm`` and ``scaled_dot_product_attention`` are one node each, and writes stay in place.
    decomposed: trace after dispatch instead. Autocast needs this, because dispatch inserts autocast's casts.
    """
    with torch.no_grad(), mode, _admits_real_constants(mode):
        return make_fx(function, pre_dispatch=not decomposed, _allow_non_fake_inputs=True)(*fakes)


def trace_decomposed(
    function: Callable[..., object],
    fakes: Sequence[object],
    mode: FakeTensorMode,
    table: Mapping[OpOverload, Callable[..., object]],
) -> fx.GraphModule:
    """Trace ``function`` on fakes after dispatch, with the decompositions in ``table``."""
    # As in AOTAutograd: ops composed in C++ that take no symbolic sizes (pad) are decomposed in Python.
    with torch.no_grad(), mode, _admits_real_constants(mode), enable_python_dispatcher():
        return make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
