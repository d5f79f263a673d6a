"""Records which elements of a model's parameters are written while a checkpoint loads."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_RUNS = 1 << 16
"""The most contiguous runs of a view to record. If a view has more runs, its whole span counts as written."""


class Written(TorchDispatchMode):
    """While this mode is active, it records which elements of each tensor storage are written by ops.

    source: a function that returns the name of the checkpoint's tensor that is being loaded.
    """

    def __init__(self, source: Callable[[], str]) -> None:
        super().__init__()
        self._source = source
        self._runs: dict[StorageWeakRef, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._sources: dict[StorageWeakRef, dict[str, None]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op and record its writes. Raises ValueError if ``copy_`` broadcasts a tensor of several elements."""
        named = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].numel() not in (1, args[0].numel()):
            raise ValueError(f"shape {list(args[1].shape)} instead of {list(args[0].shape)}")
        if func is torch.ops.aten.equal.default and any(each.is_meta for each in args):
            # LMDeploy compares a loaded tensor with the next one, which a copy without memory cannot do.
            return any(_storage(each) in self._runs for each in args) or func(*args)
        for index, name in _written_arguments(func):
            value = args[index] if index < len(args) else named.get(name)
            if isinstance(value, Tensor):
                self._runs.setdefault(_storage(value), []).append(_runs(value))
                self._sources.setdefault(_storage(value), {})[self._source()] = None
        return func(*args, **named)

    def gap(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return (first, end) of the first run of elements that were never written; None if all were written.

        parameter: a contiguous tensor. The result counts its elements from 0.
        """
        first = int(parameter.storage_offset())
        end = first + parameter.numel()
        empty = np.empty(0, dtype=np.int64)
        runs = [(empty, empty), *self._runs.get(_storage(parameter), ())]
        starts, ends = (np.concatenate(each) for each in zip(*runs, strict=True))
        order = np.argsort(starts, kind="stable")
        reached = np.maximum.accumulate(np.concatenate([[first], ends[order]]))
        starts = np.minimum(np.concatenate([starts[order], [end]]), end)
        (gaps,) = np.nonzero(starts > reached)
        return (int(reached[gaps[0]] - first), int(starts[gaps[0]] - first)) if len(gaps) else None

    def sources(self, parameter: Tensor) -> list[str]:
        """Return the names of the checkpoint's tensors that ops wrote to a parameter's storage."""
        return list(self._sources.get(_storage(parameter), ()))


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    declared = enumerate(func._schema.arguments)
    return tuple((i, each.name) for i, each in declared if each.alias_info and each.alias_info.is_write)


def _runs(view: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, ends) of the contiguous runs of elements in a view, as element offsets in the view's storage."""
    starts, length = np.array([view.storage_offset()], dtype=np.int64), 1
    if view.numel() == 0:
        return starts[:0], starts[:0]
    sizes = zip(view.stride(), view.shape, strict=True)
    outer = sorted((stride, size) for stride, size in sizes if size != 1 and stride)
    while outer and outer[0][0] == length:
        length *= outer.pop(0)[1]
    if math.prod(size for _, size in outer) > _MOST_RUNS:
        length += sum(stride * (size - 1) for stride, size in outer)
        outer = []
    for stride, size in outer:
        starts = (starts[:, None] + stride * np.arange(size)).reshape(-1)
    return starts, starts + length
