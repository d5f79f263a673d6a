"""A compiled graph: the program that joins an engine's regions, with what is needed to store and restore it."""

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
from dlinfer.graph.ir.program import Function, Program, RegionRun
from dlinfer.graph.lowering.apart import Apart, check_apart
from dlinfer.graph.lowering.kv_layouts import check_kv_layouts


@dataclass
class CompiledGraph:
    """Callable with the graph's inputs, gives the tuple of its outputs. It runs with autocast off and records no
    gradients, whatever the caller has on.

    requirement: what it needs of torch's settings for the process.
    regions: ``region_0`` -> what the engine compiled it to.
    parts: the same with what else the engine said; empty for a graph from the disk cache.
    kv_layouts: see ``kv_layouts_of``.
    resolved: which inputs torch holds lazily conjugated or negated, so that each call resolves them.
    apart: inputs that are assumed to share no memory, see ``apart_of``.
    """

    engine: Engine
    program: Program
    requirement: Requirement
    regions: Mapping[str, RegionRun] = field(default_factory=dict[str, RegionRun])
    parts: dict[str, CompiledRegion] = field(default_factory=dict[str, CompiledRegion])
    kv_layouts: dict[str, str] = field(default_factory=dict[str, str])
    resolved: tuple[int, ...] = ()
    apart: Apart = field(default_factory=list[tuple[list[int], list[int]]])

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Raises TorchStateChangedError, KVLayoutChangedError, SharedMemoryError, and what the program raises."""
        if self.kv_layouts:
            check_kv_layouts(self.kv_layouts)
        if self.resolved:
            inputs = with_resolved(inputs, self.resolved)
        if self.apart:
            check_apart(self.apart, inputs)
        return self.requirement.run(self.program, inputs)

    def unbind(self) -> None:
        """Let go of the inputs of earlier calls: memory that its owner frees is free. The next call binds anew."""
        for run in self.regions.values():
            run.unbind()

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it. Raises CodecError where a part cannot be stored."""
        regions: dict[str, Any] = {}
        for name, run in self.regions.items():
            if not isinstance(run, Program) or not self.engine.keeps({step.callee for step in run.steps}):
                raise CodecError(f"a part of {name} that engine {self.engine.name!r} does not keep on disk")
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
        """Read what ``to_dict`` gave.

        Raises where the data is not sound, the engine lacks a part of it, or KV caches are laid out otherwise now.
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
    """Return the resolver of a program that joins regions."""

    def resolve(reference: str) -> Function:
        kind, _, name = reference.partition(" ")
        return regions[name] if kind == "region" else callee.resolve(reference)

    return resolve
