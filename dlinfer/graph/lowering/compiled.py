"""A compiled graph: the program that joins an engine's regions. It can be stored and restored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlinfer.graph.codec.arguments import CodecError
from dlinfer.graph.codec.program import read_program, write_program
from dlinfer.graph.engine import CompiledRegion, Engine
from dlinfer.graph.ir import callee
from dlinfer.graph.ir.conj_neg import with_resolved
from dlinfer.graph.ir.global_state import Requirement
from dlinfer.graph.ir.program import Function, Outputs, Program, RegionRun
from dlinfer.graph.lowering.apart import Apart, check_apart
from dlinfer.graph.lowering.kv_layouts import check_kv_layouts


@dataclass
class CompiledGraph:
    """A compiled graph. A call takes the graph's inputs and returns the tuple of its outputs.

    The graph always runs with autocast off and records no gradients.

    requirement: the process's torch settings that the graph needs. Each call checks them.
    regions: name of a region (``region_0``) -> the compiled region that the program calls.
    parts: name of a region -> the result of ``Engine.compile``, with facts for reports. Empty for a graph from the disk
        cache.
    kv_layouts: device type -> the order of a KV cache's dimensions that the graph was compiled for.
    resolved: positions of inputs that torch holds lazily conjugated or negated. Each call resolves them.
    apart: inputs that must not share memory; see ``apart_of``.
    """

    engine: Engine
    program: Program
    requirement: Requirement
    regions: Mapping[str, RegionRun] = field(default_factory=dict[str, RegionRun])
    parts: dict[str, CompiledRegion] = field(default_factory=dict[str, CompiledRegion])
    kv_layouts: dict[str, str] = field(default_factory=dict[str, str])
    resolved: tuple[int, ...] = ()
    apart: Apart = field(default_factory=list[tuple[list[int], list[int]]])

    def __call__(self, *inputs: object) -> Outputs:
        """Run the graph.

        Raises TorchStateChangedError, KVLayoutChangedError, SharedMemoryError, and the errors of ops.
        """
        if self.kv_layouts:
            check_kv_layouts(self.kv_layouts)
        if self.resolved:
            inputs = with_resolved(inputs, self.resolved)
        if self.apart:
            check_apart(self.apart, inputs)
        return self.requirement.run(self.program, inputs)

    def unbind(self) -> None:
        """Release the inputs of earlier calls, such as weights, so that their memory can be freed.

        The next call keeps its own inputs again.
        """
        for run in self.regions.values():
            run.unbind()

    def to_dict(self) -> dict[str, object]:
        """Return the graph as data for JSON. Raises CodecError if a region cannot be stored."""
        regions: dict[str, object] = {}
        for name, run in self.regions.items():
            if not isinstance(run, Program) or not self.engine.keeps({step.callee for step in run.steps}):
                raise CodecError(f"engine {self.engine.name!r} cannot store a part of {name} on disk")
            regions[name] = write_program(run)
        return {
            "program": write_program(self.program),
            "requirement": self.requirement.to_dict(),
            "regions": regions,
            "kv_layouts": self.kv_layouts,
            "resolved": list(self.resolved),
            "apart": self.apart,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], engine: Engine, cache_dir: Path) -> "CompiledGraph":
        """Restore a graph from the result of ``to_dict``.

        Raises an error if the data is damaged, if the engine lacks a part of the graph, or if the KV caches now have
        another layout.
        """
        check_kv_layouts(data["kv_layouts"])
        regions: dict[str, RegionRun] = {
            name: read_program(
                stored, engine.resolve, engine.join, lambda callees: engine.restore(callees, cache_dir)
            )
            for name, stored in data["regions"].items()
        }
        return cls(
            engine,
            read_program(data["program"], resolver(regions)),
            Requirement.from_dict(data["requirement"]),
            regions,
            {},
            data["kv_layouts"],
            tuple(data["resolved"]),
            data["apart"],
        )


def resolver(regions: Mapping[str, RegionRun]) -> Callable[[str], Function]:
    """Return a function that finds the callee of a step.

    The callee ``region NAME`` is one of ``regions``. Any other callee is a function of torch or dlinfer.
    """

    def resolve(reference: str) -> Function:
        kind, _, name = reference.partition(" ")
        return regions[name] if kind == "region" else callee.resolve(reference)

    return resolve
