"""Run LMDeploy's forward by captured graphs: capture a decoding step once for each batch size, then replay it."""

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lmdeploy.pytorch.backends.graph_runner import GraphRunner

from dlinfer import settings
from dlinfer.errors import DlinferError
from dlinfer.framework.lmdeploy_ext.errors import CapturedStepError, NoDeviceGraphError
from dlinfer.framework.lmdeploy_ext.running.capture.buffers import StepBuffers
from dlinfer.framework.lmdeploy_ext.running.capture.policy import PREFILL, CapturePolicy, places
from dlinfer.graph.report.policy import leave_graph
from dlinfer.vendor.device import Device, HostNumbers

logger = logging.getLogger("dlinfer")


@dataclass
class CaptureCounts:
    """The numbers of one engine's forwards.

    captures, replays: number of rows -> how many forwards captured or replayed a graph of this size.
    eager: reason -> how many forwards ran eagerly.
    dropped: reason -> how often all graphs were dropped.
    """

    captures: Counter[int] = field(default_factory=Counter)
    replays: Counter[int] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


_runners: list[weakref.ref[CaptureCounts]] = []


def counts() -> list[CaptureCounts]:
    """Return the CaptureCounts of each engine in this process that captures steps, oldest first."""
    return [alive for reference in _runners if (alive := reference()) is not None]


@dataclass
class _Captured:
    graph: Any
    buffers: StepBuffers
    result: Any
    numbers: HostNumbers | None


class CaptureRunner(GraphRunner):
    """Runs decoding steps as graphs of the device, and all other steps eagerly.

    graphs_of: the device, whose ``graph_class`` names the class of its graphs. policy: decides which steps are
    captured; None captures batches up to LMDeploy's ``max_batch_size``. Creating the runner raises NoDeviceGraphError
    if the device has no graphs.

    If a batch size cannot be captured, the setting for fallbacks decides. With ``error`` the step raises
    CapturedStepError. Otherwise steps of this size run eagerly until all graphs are dropped.
    """

    def __init__(
        self,
        graphs_of: Device,
        model: torch.nn.Module,
        *args: Any,
        adapters: bool = False,
        policy: CapturePolicy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, *args, **kwargs)
        self._graph_class, self._device = _graph_class(graphs_of), graphs_of
        self.policy = policy or CapturePolicy(largest=self.cache_config.max_batches, adapters=adapters)
        self._captured: dict[int, _Captured] = {}
        self._refused: dict[int, str] = {}  # rows -> the error of their capture
        self._caches: Any = None
        self._held: list[Any] = []
        self._weights: Any = None
        self.counts = CaptureCounts()
        _runners.append(weakref.ref(self.counts, _runners.remove))

    def __call__(self, **kwargs: Any) -> Any:
        reason = self.policy.why_not(kwargs)
        if reason is not None:
            return self._run_eagerly(reason, kwargs)
        self._drop_stale(kwargs["past_key_values"])
        real = kwargs["input_ids"].shape[1]
        rows = self.policy.size(real)
        if rows in self._refused:
            return self._run_eagerly(self._refused[rows], kwargs)
        captured = self._captured.get(rows)
        if captured is None:
            memory = self._device.memory()
            reason = self.policy.why_not_another(len(self._captured), memory.available, memory.total)
            if reason is not None:
                return self._run_eagerly(reason, kwargs)
            return _cut(self._capture(rows, kwargs), real)
        captured.buffers.fill(kwargs)
        captured.graph.replay()
        if captured.numbers is not None:
            captured.numbers.update(_lengths(rows, kwargs))
        self.counts.replays[rows] += 1
        return _cut(captured.result, real)

    def reset(self) -> None:
        """Drop all graphs. LMDeploy calls this when it sleeps, wakes or ends, because caches and weights move then."""
        super().reset()
        self._drop("LMDeploy reset its graphs")
        self._caches, self._held = None, []

    def _run_eagerly(self, reason: str, kwargs: dict[str, Any]) -> Any:
        if reason not in self.counts.eager and reason != PREFILL:
            logger.warning("a decoding step runs eagerly, not as a graph: %s", reason)
        self.counts.eager[reason] += 1
        return self.model(**kwargs)

    def _drop_stale(self, caches: Any) -> None:
        """Drop all graphs if caches or weights have moved, or if weights were written."""
        tensors = [tensor for layer in caches for tensor in layer]
        cached = places(tensors)
        parameters = self.model.parameters()
        weights = tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters)
        if cached != self._caches:
            self._drop("caches were reallocated")
        elif weights != self._weights:
            self._drop("weights were updated")
        self._caches, self._weights = cached, weights
        self._held = tensors  # kept alive, so that no other caches get these addresses

    def _drop(self, reason: str) -> None:
        if self._captured:
            self.counts.dropped[reason] += 1
        self._captured.clear()
        self._refused.clear()

    def _capture(self, rows: int, kwargs: dict[str, Any]) -> Any:
        """Run a step eagerly over new buffers, capture it for later steps, and return the eager result.

        The eager run does everything that happens only once, such as repacking weights. It does no harm if the step
        runs a second time while it is captured: it writes the same numbers to the same cache slots again.

        rows: the number of rows of the graph.
        """
        streams = self._device.streams
        keys = kwargs["past_key_values"][0][0]
        buffers = StepBuffers(rows, keys.shape[0], kwargs["input_ids"].device, self._device.padding_length)
        buffers.fill(kwargs)
        inputs = buffers.inputs(kwargs)
        outside, inside = streams.current_stream(), streams.Stream()
        inside.wait_stream(outside)
        with streams.stream(inside):
            result = self.model(**inputs)
            streams.synchronize()
            graph, numbers = self._graph_class(), self._device.host_numbers()
            with contextlib.nullcontext() if numbers is None else numbers.recording(_lengths(rows, kwargs)):
                held = self._recorded(graph, rows, inputs)
        outside.wait_stream(inside)
        if isinstance(held, CapturedStepError):
            leave_graph("decoding step", held, settings.current().fallback)
            self._refused[rows] = str(held)
            self.counts.eager[str(held)] += 1
        else:
            self._captured[rows] = _Captured(graph, buffers, held, numbers)
            self.counts.captures[rows] += 1
        return result

    def _recorded(self, graph: Any, rows: int, inputs: dict[str, Any]) -> Any:
        """Capture a step. Return its result, which every replay overwrites, or a CapturedStepError for a failure."""
        graph.capture_begin()
        try:
            held = self.model(**inputs)
        except BaseException as cause:
            with contextlib.suppress(Exception):  # ending a failed capture raises again
                graph.capture_end()
            if not isinstance(cause, (RuntimeError, DlinferError)):
                raise
            error = CapturedStepError(rows=rows, detail=str(cause).strip().partition("\n")[0])
            error.__cause__ = cause
            return error
        graph.capture_end()
        return held


def _graph_class(device: Device) -> Callable[[], Any]:
    """Return the class of a device's graphs. Raises NoDeviceGraphError if the device's torch package has none."""
    graph_class = getattr(device.streams, device.graph_class or "", None)
    if graph_class is None:
        module = getattr(device.streams, "__name__", type(device.streams).__name__)
        raise NoDeviceGraphError(module=module, name=device.graph_class)
    return graph_class


def _lengths(rows: int, kwargs: dict[str, Any]) -> list[int]:
    """Return the sequence length of each row, with 0 for padding rows. kwargs: LMDeploy's arguments of the step.

    The lengths are read from the host's copy.
    """
    lengths = kwargs["attn_metadata"].kv_seqlens_cpu.tolist()
    return lengths + [0] * (rows - len(lengths))


def _cut(result: Any, real: int) -> Any:
    """Return a copy of a forward's result without padding rows. Later replays do not overwrite this copy.

    real: the number of rows that are no padding. Hidden states become [1, real, hidden].
    """
    if isinstance(result, torch.Tensor):
        return result[:, :real].clone()
    return result | {"hidden_states": result["hidden_states"][:, :real].clone()}
