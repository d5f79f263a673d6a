"""What differs between the eager program and the compiled one, and which differences are no more than rounding.

An element of floats counts as wrong when it lies farther from eager's, and from the same program in float64, than
``FACTOR`` times the largest of: eager's own distance from float64; what eager's result moves by when every step's
operands and result are off by one rounding; one rounding of the result. Where one of these runs alone is finite,
nothing tells how much roundings move it: one of the call's coarsest dtype counts. Whole numbers and bools must be those
of one of these runs. NaN and infinities must stand where one of them has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.fuzz.execute import CallTrace

FACTOR = 8.0
TINY = {torch.float32: 1e-35, torch.bfloat16: 1e-35, torch.float16: 3e-7, torch.float64: 1e-300}
"""Below this a result may be flushed to 0: it may be some hundred times a subnormal number."""


@dataclass(frozen=True)
class Difference:
    """kind: ``value``, ``memory``, ``dtype``, ``shape``, ``stride``, ``alias``, ``error``, ``no error``, ``guard``,
    ``structure``, ``version``."""

    kind: str
    call: int
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"call {self.call}: {self.kind} of {self.what}: {self.detail}"


Budget = Callable[[], Sequence[Sequence[CallTrace]]]
"""Other correct runs of the program: the same with other roundings, and in float64 where that works."""


def differences(
    expected: Sequence[CallTrace], given: Sequence[CallTrace], budget: Budget, watch: bool = True
) -> list[Difference]:
    """All differences of the first call that has any."""
    for number, want in enumerate(expected):
        got = given[number]
        found = _errors(number, want, got)
        if found or want.error is not None:
            return found
        found = list(_structure(number, want, got, watch))
        if not any(difference.kind in ("dtype", "shape") for difference in found):
            others = _Lazy(budget, number, [*want.results, *want.storages.values()])
            for index, (one, other) in enumerate(zip(want.results, got.results, strict=True)):
                found += _values(
                    number, "value", f"result {index}", one, other, lambda t, i=index: t.results[i], others
                )
            for name, one in want.storages.items():
                if name in got.storages:
                    found += _values(
                        number,
                        "memory",
                        name,
                        one,
                        got.storages[name],
                        lambda t, n=name: t.storages[n],
                        others,
                    )
        if found:
            return found
    return []


def _errors(number: int, want: CallTrace, got: CallTrace) -> list[Difference]:
    for name in got.guards:
        if name not in want.guards:
            return [Difference("guard", number, name, "memory that no argument covers was written")]
    if (want.error is None) == (got.error is None):
        return []
    if want.error is None:
        return [Difference("error", number, type(got.error).__name__, _first_line(got.error))]
    return [Difference("no error", number, type(want.error).__name__, _first_line(want.error))]


def _first_line(error: BaseException | None) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]


def _structure(number: int, want: CallTrace, got: CallTrace, watch: bool):
    if len(want.results) != len(got.results):
        yield Difference("shape", number, "results", f"{len(got.results)} in place of {len(want.results)}")
        return
    for index, (one, other) in enumerate(zip(want.results, got.results, strict=True)):
        if one.dtype != other.dtype:
            yield Difference("dtype", number, f"result {index}", f"{other.dtype} in place of {one.dtype}")
        elif one.shape != other.shape:
            yield Difference(
                "shape", number, f"result {index}", f"{tuple(other.shape)} in place of {tuple(one.shape)}"
            )
    if not watch:
        return
    if want.structure and got.structure and want.structure != got.structure:
        yield Difference(
            "structure", number, "results", f"{got.structure} in place of {want.structure}"[:300]
        )
    for name in sorted(want.written - got.written):
        yield Difference("version", number, name, "a write did not count")
    first = len(want.results) - len(want.strides)
    for index, (one, other) in enumerate(zip(want.strides, got.strides, strict=True)):
        shape = want.results[first + index].shape
        if 0 not in shape and not same_strides(shape, one, other):
            yield Difference("stride", number, f"result {index}", f"{other} in place of {one}")
    for index, name in sorted(want.aliases ^ got.aliases):
        how = "does not share" if (index, name) in want.aliases else "shares"
        yield Difference("alias", number, f"result {index}", f"{how} memory with {name}")


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether strides place all elements alike: that of a size of 1 says nothing."""
    return all(s == t for n, s, t in zip(shape, one, other, strict=True) if n > 1)


class _Lazy:
    """The other correct runs, made when they are first needed."""

    def __init__(self, budget: Budget, call: int, tensors: Sequence[torch.Tensor]) -> None:
        self._budget, self._call = budget, call
        self.coarsest = max((eps_of(one) for one in tensors if one.is_floating_point()), default=0.0)

    def tensors(self, read: Callable[[CallTrace], torch.Tensor]) -> list[torch.Tensor]:
        return [
            read(run[self._call])
            for run in self._budget()
            if len(run) > self._call and run[self._call].error is None
        ]


def _values(
    number: int,
    kind: str,
    what: str,
    want: torch.Tensor,
    got: torch.Tensor,
    read: Callable[[CallTrace], torch.Tensor],
    others: _Lazy,
) -> list[Difference]:
    if want.numel() == 0 or _close(want, got):
        return []
    runs = [one for one in others.tensors(read) if one.shape == want.shape]
    wrong = _wrong(want, got, runs, others.coarsest)
    count = int(wrong.sum())
    if not count:
        return []
    place = tuple(int(one) for one in wrong.nonzero()[0])
    values = f"{got[place].item()!r} in place of {want[place].item()!r} at {list(place)}"
    detail = f"{values}, {count} of {wrong.numel()} elements"
    return [Difference(kind, number, what, detail)]


def eps_of(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def _close(want: torch.Tensor, got: torch.Tensor) -> bool:
    if want.is_floating_point():
        eps = eps_of(want)
        return torch.allclose(
            want.double(), got.double(), rtol=2 * eps, atol=TINY[want.dtype], equal_nan=True
        )
    return torch.equal(want, got)


def _wrong(
    want: torch.Tensor, got: torch.Tensor, runs: Sequence[torch.Tensor], coarsest: float
) -> torch.Tensor:
    """Which elements are wrong."""
    if not want.is_floating_point():
        right = want == got
        for one in runs:
            right |= one.to(want.dtype) == got
        if runs and want.dtype != torch.bool:
            every = torch.stack([want, *(one.to(want.dtype) for one in runs)])
            right |= (got >= every.amin(0)) & (got <= every.amax(0))
        return ~right
    every = torch.stack([want.double(), *(_as(one, want.dtype) for one in runs)])
    finite = torch.where(every.isfinite(), every, torch.nan)
    eager, mine = want.double(), got.double()
    eps = torch.where(every.isfinite().sum(0) == 1, coarsest, eps_of(want))
    near = torch.where(eager.isfinite(), eager, torch.nan_to_num(finite, 0.0).amax(0))
    spread = torch.nan_to_num((finite - near).abs(), 0.0).amax(0)
    allowed = FACTOR * torch.maximum(spread, eps * near.abs()) + TINY[want.dtype]
    right = torch.zeros_like(mine, dtype=torch.bool)
    for one in every:
        same_kind = (one.isnan() & mine.isnan()) | (one.isinf() & (one == mine))
        right |= same_kind | (one.isfinite() & mine.isfinite() & ((one - mine).abs() <= allowed))
    return ~right


def _as(one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A run's floats as float64; what is too large for the dtype is infinite there."""
    one = one.double()
    return torch.where(one.abs() > torch.finfo(dtype).max, one.sign() * torch.inf, one)
