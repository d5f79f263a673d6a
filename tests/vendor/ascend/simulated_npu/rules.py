"""How an op of the simulation says that its documents do not admit a call."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)


class NotAdmittedError(RuntimeError):
    """The vendor's documents do not admit a call."""


def require(condition: bool, text: str) -> None:
    """``text`` says what the documents want."""
    if not condition:
        raise NotAdmittedError(text)


def tensor(
    name: str,
    x: Tensor,
    dtypes: Iterable[torch.dtype],
    dims: int | tuple[int, int],
    *,
    gaps: bool = False,
    empty: bool = False,
) -> None:
    """A tensor's dtype, number of dimensions, and that it has no gaps and is not empty where that is not said."""
    least, most = (dims, dims) if isinstance(dims, int) else dims
    require(x.dtype in tuple(dtypes), f"{name}: one of {list(dtypes)}, not {x.dtype}")
    require(least <= x.dim() <= most, f"{name}: {least} to {most} dimensions, not {tuple(x.shape)}")
    require(gaps or x.is_contiguous(), f"{name}: contiguous, not of strides {x.stride()}")
    require(empty or x.numel() > 0, f"{name}: not empty")


def shape(name: str, x: Tensor, wanted: Sequence[int]) -> None:
    """A tensor's sizes."""
    require(tuple(x.shape) == tuple(wanted), f"{name}: {tuple(wanted)}, not {tuple(x.shape)}")


def same_dtype(**tensors: Tensor | None) -> None:
    """All that are given have one dtype."""
    given = {name: one.dtype for name, one in tensors.items() if one is not None}
    require(len(set(given.values())) <= 1, f"one dtype, not {given}")


def unused(**arguments: object) -> None:
    """Arguments that the simulation does not know, which the kernels leave at their defaults."""
    given = {name: value for name, value in arguments.items() if value not in (None, 0, False, "", [])}
    require(not given, f"not simulated: {given}")


def one_of(name: str, value: object, values: Iterable[object]) -> None:
    """A value out of some."""
    require(value in tuple(values), f"{name}: one of {tuple(values)}, not {value!r}")


def within(name: str, x: Tensor, low: float, high: float) -> None:
    """All values of a tensor lie between two, both included; NaN does not."""
    if x.numel():
        ok = bool(((x >= low) & (x <= high)).all())
        require(ok, f"{name}: values of {low} to {high}, not {float(x.min())} to {float(x.max())}")


_NUMBERS = {
    one: number
    for number, one in {
        0: torch.uint8,
        1: torch.int8,
        3: torch.int32,
        4: torch.int64,
        5: torch.float16,
        6: torch.float32,
        12: torch.qint8,
        13: torch.quint8,
        15: torch.bfloat16,
    }.items()
}


def dtype(number: int | None, default: torch.dtype) -> torch.dtype:
    """torch's dtype of its number, as an ``int?`` of a schema carries it."""
    if number is None:
        return default
    found = [one for one, known in _NUMBERS.items() if known == number]
    require(len(found) == 1, f"a dtype's number, not {number}")
    return found[0]
