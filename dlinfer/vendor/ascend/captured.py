"""Pass the sequence lengths of each step to the kernels in an NPUGraph.

The vendor's attention reads lengths from host memory, and a captured call would keep the lengths of the capture. So
each call with lengths is captured as a task group that waits for an external event. During a replay, another stream
puts the lengths of the step into the task group and then records the event.

torch_npu's own graphs make the same calls in the same order (torch_npu 2.13.0, ``npu/graphs.py``, and torchair's
CapturedGraphUpdateAndReplay). torch_npu's ``auto_dispatch_capture`` cannot be used: it does not see ops inside
dlinfer's ops.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.ascend import sdk

Numbers = Callable[[list[int]], dict[str, Any]]
"""Takes the sequences' lengths, and returns the arguments of an op that depend on them."""

_recording: ContextVar["CapturedLengths | None"] = ContextVar("_recording", default=None)


def current() -> "CapturedLengths | None":
    """Return the ``CapturedLengths`` of the capture in progress; None outside a capture."""
    return _recording.get()


@dataclass(frozen=True)
class _Task:
    """A captured call of an op. Each replay updates the arguments that depend on the lengths.

    The tensors in ``arguments`` are weak references, because the graph's memory pool may reuse their memory.
    """

    event: Any
    handle: Any
    op: Callable[..., Any]
    arguments: dict[str, Any]
    numbers: Numbers


class CapturedLengths:
    """Passes the sequences' lengths to the kernels in one captured graph (``vendor.device.HostNumbers``)."""

    def __init__(self) -> None:
        self._npu = sdk.cards()
        self._tasks: list[_Task] = []
        self._kept: dict[Any, Tensor] = {}
        self._lengths: list[int] = []
        self._updates: Any = None
        self._replayed = self._npu.Event()

    @contextmanager
    def recording(self, kv_seqlens: Sequence[int]) -> Iterator[None]:
        """Return a context for a capture on the current stream. In it, kernels' calls with lengths become tasks."""
        self._lengths = _served(kv_seqlens)
        token = _recording.set(self)
        try:
            yield
        finally:
            _recording.reset(token)

    def update(self, kv_seqlens: Sequence[int]) -> None:
        """Pass a step's lengths to the replay that was put on the current stream last. The replay waits for them."""
        if not self._tasks:
            return
        npu, lengths, replaying = self._npu, _served(kv_seqlens), self._npu.current_stream()
        while self._updates is None or self._updates == replaying:  # streams come from a pool and repeat
            self._updates = npu.Stream(priority=-1)
        with npu.stream(self._updates):
            # an event that is recorded before the last replay has reset it would be lost to this one
            self._updates.wait_event(self._replayed)
            for task in self._tasks:
                npu.graph_task_update_begin(self._updates, task.handle)
                task.op(**task.arguments, **task.numbers(lengths))
                npu.graph_task_update_end(self._updates)
                task.event.record(self._updates)
        self._replayed.record(replaying)

    def run(self, op: Callable[..., Any], numbers: Numbers, **arguments: Any) -> None:
        """Capture a call of ``op`` with ``arguments``. These include the tensors for the results of ``op``.

        The arguments that depend on the lengths come from ``numbers``, which is called again for each replay.
        """
        npu, stream = self._npu, self._npu.current_stream()
        event = npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        npu.graph_task_group_begin(stream)
        op(**arguments, **numbers(self._lengths))
        handle = npu.graph_task_group_end(stream)
        places = {name: _places(value) for name, value in arguments.items()}
        self._tasks.append(_Task(event, handle, op, places, numbers))

    def numbers_of(self, numbers: Numbers) -> dict[str, Any]:
        """Return the op arguments that ``numbers`` gives for the lengths of the capture."""
        return numbers(self._lengths)

    def once(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of ``key``. The first layer that asks computes it by ``make``; later layers share it."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def padding(self, kv_seqlens: Tensor) -> Tensor:
        """Return bool [rows] on the device: True for a padding row, which has no sequence. Each replay computes it."""
        return self.once(("padding", kv_seqlens.data_ptr()), lambda: kv_seqlens < 1)

    def slots(self, slots: Tensor) -> Tensor:
        """Replace the negative slots of padding rows by slots that no other row writes.

        The vendor has no number for "no slot", so each padding row must write into some slot. ``fill_kv_cache`` makes
        it write the contents that the slot already has. The cache must have at least two slots for each row, so that
        enough slots are free.
        """
        return self.once(("slots", slots.data_ptr()), lambda: _distinct(slots))

    def unwritten(self, slots: Tensor) -> Tensor:
        return self.once(("unwritten", slots.data_ptr()), lambda: slots < 0)


def _served(kv_seqlens: Sequence[int]) -> list[int]:
    """Return the lengths for the vendor's attention: 1 in place of 0 for a padding row.

    The caller drops the results of padding rows.
    """
    return [max(length, 1) for length in kv_seqlens]


def _distinct(slots: Tensor) -> Tensor:
    """Replace each negative slot by a free slot, a different one for each row.

    The free slots come from the first 2 * rows slots, because the rows use at most half of them.
    """
    rows = slots.shape[0]
    first = torch.arange(2 * rows, device=slots.device)
    taken = (first.unsqueeze(0) == slots.unsqueeze(1)).any(0)
    free = first.masked_fill(taken, 2 * rows).sort().values[:rows]
    return torch.where(slots < 0, free.to(slots.dtype), slots)


def _places(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_places(item) for item in value]
    return sdk.weak_reference(value) if isinstance(value, Tensor) else value
