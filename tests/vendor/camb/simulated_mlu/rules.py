"""How a function of the simulation says that its documents do not admit a call: as the simulated NPU does, and more."""

from torch import Tensor

from tests.vendor.ascend.simulated_npu.rules import (
    FLOATS,
    HALVES,
    NotAdmittedError,
    one_of,
    require,
    same_dtype,
    shape,
    tensor,
    within,
)

__all__ = [
    "FLOATS",
    "HALVES",
    "NotAdmittedError",
    "dense_heads",
    "one_of",
    "require",
    "same_dtype",
    "shape",
    "tensor",
    "unused",
    "within",
]


def unused(**arguments: object) -> None:
    """Arguments that the simulation does not know, which the kernels leave at nothing."""
    given = [name for name, value in arguments.items() if isinstance(value, Tensor) or value]
    require(not given, f"not simulated: {', '.join(given)}")


def dense_heads(name: str, x: Tensor) -> None:
    """Of [..., heads, size], the heads of a token in one piece."""
    dense = x.stride(-1) == 1 and (x.stride(-2) == x.shape[-1] or x.shape[-2] == 1)
    require(dense, f"{name}: heads that follow each other, not of strides {x.stride()}")
