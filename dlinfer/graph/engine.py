"""The base class of graph engines, and the search for an engine by name.

An engine accepts or refuses each node of a graph, and compiles regions of accepted nodes. The class of an engine lies
in its vendor's folder, and ``Vendor.engines`` lists the engine's name.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import fx

from dlinfer.errors import (
    CompileOptionError,
    DlinferError,
    EngineUnavailableError,
    VendorClashError,
    VendorLoadError,
)
from dlinfer.graph.ir.callee import resolve
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.program import Function, RegionRun, Step
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.report.report import ClusterReport
from dlinfer.vendor import discovery
from dlinfer.vendor.base import Vendor


@dataclass
class CompiledRegion:
    """A compiled region, with facts for reports.

    run: the object that executes the region: a Program if the engine runs steps, otherwise an object of the engine's
        own.
    placement: node name -> how the node runs, such as ``kernel ...`` or ``cluster ...``.
    refused: node name -> the reason why the node runs eagerly although the engine accepted it.
    notes: other facts, a sentence each. The engine may append notes while the region runs.
    """

    run: RegionRun
    placement: dict[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    clusters: list[ClusterReport] = field(default_factory=list[ClusterReport])
    notes: list[str] = field(default_factory=list[str])


class EngineCompileError(DlinferError, RuntimeError):
    """A graph engine raised an exception while it compiled a region, in place of refusing the region."""

    message = "graph engine {engine!r} failed to compile {region}: {detail}."
    next_step = (
        "choose another engine, or keep ops out of this one with options={{'eager_ops': [...]}}; report the error to "
        "the engine's vendor."
    )


@contextmanager
def compiling(engine: str, region: str) -> Generator[None]:
    """Turn an exception that an engine raises while it compiles a region into EngineCompileError.

    Errors of dlinfer, and errors for exhausted memory, stay as they are.
    """
    try:
        yield
    except (DlinferError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        detail = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(".")
        raise EngineCompileError(engine=engine, region=region, detail=detail) from error


class SelfTest(Protocol):
    """Cases that the engine must compute correctly on this CPU before dlinfer uses it (``dlinfer.graph.selftest``)."""

    def failure(self, op: str, precision: str) -> str | None:
        """Return a reason not to use ``op`` in ``precision``; None if the op passed its tests."""
        ...


class Engine(ABC):
    """The interface that a vendor implements for graphs. One object serves the whole process, from any thread.

    A vendor must implement ``refuses`` and ``compile``. All other members have a default.

    name: the engine's name, unique among installed vendors.
    passes: graph passes for this engine only. They run after the common passes, and are named ``engine.pass``.
    phases_alike: whether a graph that was compiled for prefill is as fast in decode as one that was compiled for
        decode. If so, adaptors compile the model once, and the engine holds its repacked weights once.
    stored_options: names of the engine's options that change results. An artifact keeps the values of these options.
        Never list an option whose value leads to a file: an artifact may come from an untrusted source.
    concurrent: whether several threads may call one compiled region at the same time.
    selftest: the engine's self-test; None if there is none.
    """

    name: str
    passes: Sequence[Pass] = ()
    phases_alike: bool = False
    stored_options: Collection[str] = ()
    concurrent: bool = False
    selftest: SelfTest | None = None

    # --- compiling

    @abstractmethod
    def refuses(self, node: fx.Node) -> str | None:
        """Return a reason not to run a node in this engine; None if the engine accepts the node."""

    @abstractmethod
    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """Compile a region of nodes that were not refused."""

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """Return a reason not to run a region of these nodes in this engine; None if there is none.

        The reason is that the region is too small: entering it would cost more than running its nodes eagerly.
        """
        return None

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raise CompileOptionError for an unknown option or an invalid value. The error lists what is allowed."""
        for name, value in options.items():
            expected = f"none: engine {self.name!r} has no options"
            raise CompileOptionError(option=f"engine_options[{name!r}]", given=value, expected=expected)

    # --- programs of steps, in memory and in the disk cache

    def resolve(self, callee: str) -> Function:
        """Return the function that a step's ``callee`` names; by default a function of torch or dlinfer."""
        return resolve(callee)

    def join(
        self, steps: Sequence[Step], outputs: Iterable[str]
    ) -> tuple[Sequence[Step], Mapping[str, Function]]:
        """Replace several steps by one call, where the engine can.

        Return the new steps, and callee -> function for the calls that replace steps.
        outputs: names of the values that are read after these steps.
        """
        return steps, {}

    def restore(self, callees: Collection[str], cache_dir: Path) -> None:
        """Load the callees of a stored program from the disk cache. Raises MissingEntryError if one is missing."""
        for callee in callees:
            self.resolve(callee)

    def keeps(self, callees: Collection[str]) -> bool:
        """Return whether ``restore`` can load these callees in another process."""
        return True

    def identity(self, cache_dir: Path) -> str | Mapping[str, object]:
        """Return the facts that stored programs depend on, besides the environment (cache/fingerprint)."""
        return ""


def check_options(engine: Engine, options: CompileOptions) -> None:
    """Raise CompileOptionError if ``engine`` lacks an engine option, or an engine's pass, that ``options`` names."""
    engine.check_options(options.wanted_engine_options)
    own = [item.name for item in engine.passes]
    for name in options.passes:
        if "." in name and name not in own:
            expected = f"a pass that engine {engine.name!r} has ({', '.join(own) or 'it has no passes'})"
            raise CompileOptionError(option="passes", given=name, expected=expected)


def find_engine(name: str | None, device_type: str) -> Engine:
    """Return the engine called ``name``; for None, the default engine of the device's vendor.

    Raises EngineUnavailableError if no usable vendor provides the engine, VendorLoadError if loading fails, and
    VendorClashError if two vendors provide it.
    """
    if name is None:
        active = discovery.activate_default(device_type)
        name = None if active is None else active.default_engine
        if name is None:
            raise _unavailable("default", f"no vendor with a graph engine serves device {device_type!r}")
    providers = [vendor for vendor in discovery.loadable() if name in vendor.engines]
    if not providers:
        raise _unavailable(name, "no installed vendor provides it")
    if len(providers) > 1:
        first, second = (f"vendor {vendor.name!r}" for vendor in providers[:2])
        raise VendorClashError(what=f"the graph engine {name!r}", first=first, second=second)
    probe = discovery.probe(providers[0])
    if not probe.available:
        raise _unavailable(name, probe.reason)
    return _loaded(providers[0], name)


def provider_of(engine: str) -> str | None:
    """Return the name of the vendor that provides this engine; None if no vendor does."""
    return next((vendor.name for vendor in discovery.loadable() if engine in vendor.engines), None)


def _unavailable(engine: str, reason: str) -> EngineUnavailableError:
    usable = (
        vendor for vendor in discovery.loadable() if vendor.engines and discovery.probe(vendor).available
    )
    names = sorted({name for vendor in usable for name in vendor.engines} - {engine})
    return EngineUnavailableError(engine=engine, reason=reason, available=", ".join(names) or "none")


_engines: dict[tuple[str, str], Engine] = {}  # (vendor, engine): two vendors may use one engine name
_lock = threading.RLock()


def _loaded(vendor: Vendor, name: str) -> Engine:
    cause: Exception | None = None
    with _lock:  # one engine object per process, because it holds devices and compiled regions
        if (vendor.name, name) in _engines:
            return _engines[vendor.name, name]
        try:
            engine = vendor.load_engine(name) if vendor.load_engine is not None else None
            if isinstance(engine, Engine):
                return _engines.setdefault((vendor.name, name), engine)
            detail = f"load_engine returned {type(engine).__name__}, not a dlinfer.graph.engine.Engine"
        except DlinferError:
            raise
        except Exception as error:  # noqa: BLE001 - a plugin's code may fail in any way
            cause, detail = error, f"{type(error).__name__}: {error}"
    raise VendorLoadError(vendor=vendor.name, source=f"its engine {name!r}", detail=detail) from cause
