"""What the tensors of a call hold and how they lie: storages with views on them, so that aliases and the memory between
and around the views are part of the test."""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tests.fuzz.program import Call, Input, Program, size_of, sizes_of

LAYOUTS = ("plain", "guarded", "offset", "transposed", "rows", "columns", "expanded", "reversed", "negated")
"""plain: a tensor of its own. guarded: memory in front and behind that is not its own. offset: one element further, so
badly aligned. transposed: the last two dimensions swapped in memory. rows, columns: a slice with gaps of a wider one.
expanded: the first dimension has stride 0. reversed: dimensions in reverse order in memory. negated: floats that torch
negates when it reads them (``is_neg()``)."""

CONTENTS = (
    "normal",
    "special",
    "extreme",
    "whole",
    "limits",
    "index",
    "beyond",
    "unused",
    "same",
    "slots",
    "flags",
)
"""normal: of the normal distribution (small numbers for integers). special: NaN, infinities, zeros of both signs among
them. extreme: where activations overflow or vanish. whole: whole numbers, at 2**24 for floats. limits: integers at
2**24, 2**31, 2**53 and the ends of their type. index: indices within ``bound``. beyond: some indices outside.
unused: memory that nobody wrote, filled with NaN. same: all equal. slots: distinct indices within ``bound``. flags: 0
and 1."""

GUARD = 16  # elements in front and behind; 64 bytes or more keep float32's alignment of vectors

_SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0)
_EXTREME = (
    -104.0,
    -88.5,
    -30.0,
    -18.0,
    -9.0,
    -1e-6,
    0.0,
    1e-6,
    1e-3,
    9.0,
    18.0,
    21.0,
    30.0,
    88.5,
    104.0,
    1e4,
    -1e4,
)
_BORDERS = (2**24, 2**31, 2**53)


@dataclass
class Storage:
    """One piece of memory, as a flat tensor, and which of its elements belong to a view."""

    memory: torch.Tensor
    covered: torch.Tensor


@dataclass
class View:
    """Where an input lies in its storage; ``same_as`` names the input whose tensor object it is.

    dtype: where it is another than the storage's; strides and offset count its elements. negated: whether its negative
    bit is set.
    """

    storage: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    same_as: str = ""
    dtype: str = ""
    negated: bool = False

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, given its storage."""
        memory = memory.view(getattr(torch, self.dtype)) if self.dtype else memory
        tensor = memory.as_strided(self.size, self.stride, self.offset)
        return torch._neg_view(tensor) if self.negated else tensor


def at_call(one: Input, call: Call) -> Input:
    """An input as a call changes it."""
    change = call.changes.get(one.name, {})
    return replace(one, **{name: tuple(v) if isinstance(v, list) else v for name, v in change.items()})


def plan(program: Program, call: Call, roles: tuple[str, ...]) -> dict[str, View]:
    """Where each input of some roles lies at a call. The storage of an input has its name."""
    views: dict[str, View] = {}
    for one in program.of_role(*roles):
        given = at_call(one, call)
        if given.alias and given.alias[0] in views:
            views[one.name] = _aliased(views[given.alias[0]], given, call)
            continue
        size = sizes_of(given.shape, call.sizes)
        stride, offset = _lies(size, given.layout)
        negated = given.layout == "negated" and getattr(torch, given.dtype).is_floating_point
        views[one.name] = View(one.name, size, stride, offset, negated=negated)
    return views


def _aliased(other: View, one: Input, call: Call) -> View:
    name, how = one.alias
    if how == "bytes":
        size = sizes_of(one.shape, call.sizes)
        return View(other.storage, size, _lies(size, "plain")[0], 0, dtype=one.dtype)
    if how == "same":
        return replace(other, same_as=name)
    return replace(other, offset=other.offset + (how == "shift"), same_as="")


def _lies(size: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int]:
    """(strides, offset) of a layout."""
    order = list(range(len(size)))
    if layout == "transposed" and len(size) > 1:
        order[-2:] = order[:-3:-1]
    if layout == "reversed":
        order.reverse()
    gaps = {"columns": len(size) - 1, "rows": max(len(size) - 2, 0)}.get(layout, -1)
    stride, step = [0] * len(size), 1
    for dim in reversed(order):
        stride[dim] = step * (2 if dim == gaps else 1)
        step = stride[dim] * max(size[dim], 1)
    if layout == "expanded" and size:
        stride[0] = 0
    return tuple(stride), 0 if layout == "plain" else GUARD + (layout == "offset")


def make(
    program: Program, number: int, roles: tuple[str, ...], widen: bool = False
) -> tuple[dict[str, Storage], dict[str, torch.Tensor]]:
    """(storages, tensors) of a call's inputs of some roles; ``widen`` gives their floats as float64."""
    call = program.calls[number]
    views = plan(program, call, roles)
    inputs = {one.name: at_call(one, call) for one in program.inputs}
    storages: dict[str, Storage] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, view in views.items():
        if view.storage not in storages:
            sharing = {other: v for other, v in views.items() if v.storage == name}
            storages[name] = _storage(program.seed, number, inputs, sharing, name, call.sizes)
            if widen and storages[name].memory.is_floating_point():
                storages[name].memory = storages[name].memory.double()
        if view.same_as:
            tensors[name] = tensors[view.same_as]
        else:
            tensors[name] = view.of(storages[view.storage].memory)
    return storages, tensors


def _storage(
    seed: int,
    number: int,
    inputs: Mapping[str, Input],
    views: Mapping[str, View],
    owner: str,
    sizes: dict[str, int],
) -> Storage:
    one = inputs[owner]
    views = {name: view for name, view in views.items() if not view.dtype}  # these lie within the others
    end = max(
        1 + v.offset + sum((n - 1) * s for n, s in zip(v.size, v.stride, strict=True)) for v in views.values()
    )
    if 0 in views[owner].size:
        end = views[owner].offset
    total = end if one.layout == "plain" and len(views) == 1 else end + GUARD
    dtype = getattr(torch, one.dtype)
    memory = torch.full((total,), _gap(dtype), dtype=dtype)
    places = torch.arange(total)
    covered = torch.zeros(total, dtype=torch.bool)
    for view in views.values():
        if 0 not in view.size:
            covered[places.as_strided(view.size, view.stride, view.offset).reshape(-1)] = True
    count = int(covered.sum())
    memory[covered] = content(one.content, dtype, count, size_of(one.bound, sizes), (seed, number, owner))
    return Storage(memory, covered)


def _gap(dtype: torch.dtype) -> float:
    """What unused memory holds: whatever is computed with it shows."""
    return math.nan if dtype.is_floating_point else 113 if dtype != torch.bool else 1


def content(kind: str, dtype: torch.dtype, count: int, bound: int, key: tuple[object, ...]) -> torch.Tensor:
    """``count`` values of a kind, the same ones for the same key."""
    random = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))

    def pick(choices: list[float] | list[int], kept: torch.dtype) -> torch.Tensor:
        which = torch.randint(len(choices), (count,), generator=random)
        return torch.tensor(choices, dtype=kept)[which]

    normal = torch.randn(count, generator=random, dtype=torch.float64)
    if kind in ("index", "beyond"):
        found = torch.randint(-bound, max(bound, 1 - bound), (count,), generator=random)
        if not key or zlib.crc32(repr(key).encode()) % 2 == 0:
            found = found.abs().clamp(max=max(bound - 1, 0))  # embedding takes no negative ones
        if kind == "beyond" and count:
            found[int(torch.randint(count, (1,), generator=random))] = pick(
                [bound, bound + 3, -bound - 1], torch.int64
            )[0]
        return found.to(dtype)
    if kind == "slots":
        return torch.randperm(max(bound, count), generator=random)[:count].to(dtype)
    if kind == "flags":
        return (normal > 0).to(dtype)
    if dtype == torch.bool:
        return normal > (-3 if kind == "same" else 0)
    if kind == "same":
        return torch.full((count,), 2, dtype=dtype)
    if not dtype.is_floating_point:
        small = (normal * 3).round().to(torch.int64)
        if kind != "limits":
            return small.abs().to(dtype) if dtype == torch.uint8 else small.to(dtype)
        info = torch.iinfo(dtype)
        borders = [border + near for border in _BORDERS for near in (-1, 0, 1)]
        near = [v for sign in (1, -1) for b in borders if info.min <= (v := sign * b) <= info.max]
        return pick([info.min, info.max, 0, 1, 7, *near], dtype)
    if kind == "unused":
        return torch.full((count,), math.nan, dtype=dtype)
    chosen = {
        "special": lambda: torch.where(normal.abs() > 0.7, pick(list(_SPECIAL), torch.float64), normal),
        "extreme": lambda: pick(list(_EXTREME), torch.float64),
        "whole": lambda: torch.where(
            normal > 1.5, pick([2**24 - 1, 2**24, -(2**24)], torch.float64), (normal * 4).round()
        ),
    }
    return chosen.get(kind, lambda: normal)().to(dtype)
