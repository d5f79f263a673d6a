"""What Dynamo did during a run of calls: compilations with their cause, and graph breaks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

RECOMPILE_LIMIT = 24
"""Instead of Dynamo's 8, which a static cache with a sliding window reaches with any backend when one process sees
all sizes: its branches on a Python int (window full or not) multiply the size-1 variants."""


@dataclass(frozen=True)
class Compilation:
    """One compilation of one frame.

    call: the call during which it happened, as the plan names it.
    frame: Dynamo's number of the code object; graph breaks give a model several.
    size_one: whether the call had a 1 in a dimension that varies between the calls, which Dynamo specialises.
    reason: the guard that failed, empty for a frame's first compilation.
    """

    call: str
    frame: int
    size_one: bool
    reason: str


@dataclass
class Trace:
    """Everything Dynamo did from ``reset`` on."""

    compilations: list[Compilation] = field(default_factory=list)
    graphs: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Observer:
    """Notes what Dynamo compiles. ``varying`` holds the dimensions that differ between calls."""

    def __init__(self, varying: set[tuple[str, int]]) -> None:
        self.trace = Trace()
        self._varying = varying
        torch._dynamo.reset()
        counters.clear()
        # Past its limit Dynamo would run the frame eagerly, and comparisons would compare eager with eager.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT

    @contextmanager
    def watch(self, call: str, inputs: dict[str, Any]) -> Iterator[None]:
        """Attribute what is compiled inside to one call."""
        clear_compilation_metrics()
        try:
            yield
        finally:
            size_one = any(dimension in self._varying for dimension in dimensions_of_one(inputs))
            for entry in get_compilation_metrics():
                if not entry.has_guarded_code or not entry.graph_op_count or entry.compile_id is None:
                    continue
                frame = int(entry.compile_id.split("/")[0].rpartition("!")[2])
                reason = (entry.recompile_reason or "").splitlines()
                self.trace.compilations.append(
                    Compilation(call, frame, size_one, reason[0] if reason else "")
                )
            self.trace.graphs = counters["stats"]["unique_graphs"]
            self.trace.graph_breaks = {
                first_line(key): count for key, count in counters["graph_break"].items()
            }


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def shapes_of(inputs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a call's tensors by keyword, also of those one level down in a tuple."""
    shapes = {}
    for name, value in inputs.items():
        for index, leaf in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(leaf, torch.Tensor):
                shapes[f"{name}.{index}"] = tuple(leaf.shape)
    return shapes


def dimensions_of_one(inputs: dict[str, Any]) -> set[tuple[str, int]]:
    return {
        (name, d) for name, shape in shapes_of(inputs).items() for d, size in enumerate(shape) if size == 1
    }


def varying_dimensions(calls: list[dict[str, tuple[int, ...]]]) -> set[tuple[str, int]]:
    """Which dimensions of which inputs take more than one size over a list of calls' shapes."""
    seen: dict[tuple[str, int], set[int]] = {}
    for shapes in calls:
        for name, shape in shapes.items():
            for d, size in enumerate(shape):
                seen.setdefault((name, d), set()).add(size)
    return {dimension for dimension, sizes in seen.items() if len(sizes) > 1}
