"""Notes the numbers of a model's parameters that are written while a checkpoint loads into it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_RUNS = 1 << 16
"""A view of more contiguous runs counts as written from its first number to its last."""


@dataclass
class _Notes:
    """Writes to one storage. starts, ends: of contiguous runs. sources: names of the tensors that were written."""

    starts: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)


class Written(TorchDispatchMode):
    """Notes every write of an op to a storage while it is active.

    source: returns the name of the checkpoint's tensor that is loaded at the moment.
    """

    def __init__(self, source: Callable[[], str]) -> None:
        super().__init__()
        self._source = source
        self._notes: dict[Any, _Notes] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op and note its writes. Raises ValueError where a copy would repeat numbers to fill its place."""
        named = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].numel() not in (1, args[0].numel()):
            raise ValueError(f"shape {list(args[1].shape)} where {list(args[0].shape)} is expected")
        if func is torch.ops.aten.equal.default and any(each.is_meta for each in args):
            # LMDeploy compares a loaded tensor with the next one, which a copy without memory cannot do.
            return any(StorageWeakRef(each.untyped_storage()) in self._notes for each in args) or func(*args)
        for index, name in _written_arguments(func):
            value = args[index] if index < len(args) else named.get(name)
            if isinstance(value, Tensor):
                self._note(value)
        return func(*args, **named)

    def _note(self, view: Tensor) -> None:
        notes = self._notes.setdefault(StorageWeakRef(view.untyped_storage()), _Notes())
        notes.sources[self._source()] = None
        starts, length = _runs(view)
        notes.starts.append(starts)
        notes.ends.append(starts + length)

    def gap(self, parameter: Tensor) -> tuple[int, int] | None:
        """(first, end) of the first run of numbers that nothing was written to, or None. parameter: contiguous."""
        notes = self._notes.get(StorageWeakRef(parameter.untyped_storage()), _Notes())
        first = int(parameter.storage_offset())
        end = first + parameter.numel()
        starts, ends = (np.concatenate([[], *runs]).astype(np.int64) for runs in (notes.starts, notes.ends))
        order = np.argsort(starts, kind="stable")
        reached = np.maximum.accumulate(np.concatenate([[first], ends[order]]))
        starts = np.minimum(np.concatenate([starts[order], [end]]), end)
        (gaps,) = np.nonzero(starts > reached)
        return (int(reached[gaps[0]] - first), int(starts[gaps[0]] - first)) if len(gaps) else None

    def sources(self, parameter: Tensor) -> list[str]:
        """Names of the tensors that were written to a parameter's storage."""
        notes = self._notes.get(StorageWeakRef(parameter.untyped_storage()))
        return [] if notes is None else list(notes.sources)


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """(index, name) of the arguments that an op writes to."""
    declared = enumerate(func._schema.arguments)
    return tuple(
        (i, each.name) for i, each in declared if each.alias_info is not None and each.alias_info.is_write
    )


def _runs(view: Tensor) -> tuple[np.ndarray, int]:
    """(where each contiguous run of a view begins in its storage, how long each is)."""
    sizes = [
        (int(stride), int(size)) for stride, size in zip(view.stride(), view.shape, strict=True) if size != 1
    ]
    if any(size == 0 for _, size in sizes):
        return np.empty(0, dtype=np.int64), 0
    length, outer = 1, []
    for stride, size in sorted(sizes):
        if stride == length:
            length *= size
        elif stride:
            outer.append((stride, size))
    first = int(view.storage_offset())
    starts = np.array([first], dtype=np.int64)
    for stride, size in outer:
        if len(starts) * size > _MOST_RUNS:
            span = sum(stride * (size - 1) for stride, size in sizes) + 1
            return np.array([first], dtype=np.int64), span
        starts = (starts[:, None] + stride * np.arange(size)).reshape(-1)
    return starts, length
