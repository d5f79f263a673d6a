"""The protocols between graphs and the engines that run them, and how an engine is found by name.

An engine says of each node whether it takes it, and turns a region of taken nodes into a callable. It lives in its
vendor's folder; the vendor names it in ``Vendor.engines``.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import fx

from dlinfer.errors import (
    CompileOptionError,
    DlinferError,
    EngineUnavailableError,
    VendorClashError,
    VendorLoadError,
)
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.report.report import ClusterReport
from dlinfer.vendor import discovery


@dataclass
class CompiledRegion:
    """What an engine made of a region.

    run: takes the region's inputs in order, gives the tuple of its outputs; writes go to its inputs in place.
        Engines that run steps give a Program; others a callable with a ``source`` to show.
    placement: how each node of the region runs, by name: ``kernel: ...`` or ``cluster: ...``, for reports.
    refused: why nodes that the engine took run one by one after all, by name.
    notes: what else is to be known of it, one sentence each; the engine may add to the list while it runs.
    """

    run: Any
    placement: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    clusters: list[ClusterReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Engine(Protocol):
    """A graph engine. One object serves the whole process.

    passes: what only this engine's graphs go through, after the common passes; named ``engine.pass``.
    phases_alike: whether a graph of prefill decodes as fast as one of decoding would. Adaptors then compile the model
        once, and weights that the engine repacks are held once.
    stored_options: names of the engine's options that an artifact keeps for whoever loads it: those that change
        results. Never one that leads to a file, since the artifact may come from anybody.
    """

    name: str
    passes: Sequence[Pass]
    phases_alike: bool
    stored_options: Collection[str]

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise CompileOptionError for an option that this engine does not have, naming those it has, or a value
        that it does not take."""
        ...

    def refuses(self, node: fx.Node) -> str | None:
        """Why this engine does not take a node; None when it does."""
        ...

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """Why a region is too small to be worth entering this engine; None when it is worth it."""
        ...

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """Compile a region of nodes that were not refused."""
        ...

    def resolve(self, callee: str) -> Callable[..., Any]:
        """The function behind a callee of this engine's programs."""
        ...

    def restore(self, callees: Collection[str], cache_dir: Path) -> None:
        """Make callees of a stored program resolvable from the disk cache.

        Raises MissingEntryError where one is not there.
        """
        ...

    def keeps(self, callees: Collection[str]) -> bool:
        """Whether ``restore`` in another process can do what these callees need."""
        ...

    def identity(self, cache_dir: Path) -> str | Mapping[str, Any]:
        """What this engine's stored programs depend on besides the environment (cache/fingerprint.py): a text, or by
        name."""
        ...


def check_options(engine: Engine, options: CompileOptions) -> None:
    """Raise CompileOptionError for what ``options`` ask of this engine and it does not have."""
    engine.check_options(options.wanted_engine_options)
    own = [item.name for item in engine.passes]
    for name in options.passes:
        if "." in name and name not in own:
            expected = f"one that engine {engine.name!r} has ({', '.join(own) or 'none of its own'})"
            raise CompileOptionError(option="passes", given=name, expected=expected)


def no_options(engine: str, options: Mapping[str, Any]) -> None:
    """``check_options`` of an engine that has none."""
    for name, value in options.items():
        raise CompileOptionError(
            option=f"engine_options[{name!r}]",
            given=value,
            expected=f"none: engine {engine!r} has no options",
        )


@dataclass(frozen=True)
class Payload:
    """What an engine keeps of a compiled region in an artifact, so that loading need not compile it.

    cpu: flags of the CPU (as Linux lists them) that it cannot do without.
    """

    data: bytes | bytearray | memoryview
    cpu: tuple[str, ...] = ()


@runtime_checkable
class PayloadEngine(Protocol):
    """What an engine offers besides, whose compiled regions have a form that can be kept in an artifact.

    Others lower the stored graph again when an artifact is loaded.
    """

    def version(self) -> str:
        """What its payloads depend on: one that was made under another version is refused."""
        ...

    def payload(self, compiled: CompiledRegion) -> Payload | None:
        """What to keep of a region that it compiled; None where it is to be compiled again."""
        ...

    def restore_region(
        self, region: Subgraph, payload: memoryview, options: CompileOptions
    ) -> CompiledRegion:
        """The region that ``payload`` was made of, without compiling.

        Raises any error where the payload is not sound; whoever loads makes it an ArtifactCorruptError.
        """
        ...


def runs_concurrently(engine: Any) -> bool:
    """Whether threads may run what an engine compiled at once: it says so by ``concurrent = True``."""
    return bool(getattr(engine, "concurrent", False))


def find_engine(name: str | None, device_type: str) -> Engine:
    """The engine of this name, or the default one of the device's vendor.

    Raises EngineUnavailableError, VendorClashError where two vendors provide it, and VendorLoadError where it cannot be
    loaded.
    """
    if name is None:
        vendor = discovery.activate_default(device_type)
        if vendor is None or vendor.default_engine is None:
            reason = f"no vendor with a graph engine serves device {device_type!r}"
            raise EngineUnavailableError(
                engine="default", reason=reason, available=", ".join(_names()) or "none"
            )
        name = vendor.default_engine
    providers = [vendor for vendor in discovery.loadable() if name in vendor.engines]
    if not providers:
        raise EngineUnavailableError(
            engine=name, reason="no installed vendor provides it", available=", ".join(_names()) or "none"
        )
    vendor, *others = providers
    if others:
        first, second = (f"vendor {one.name!r}" for one in (vendor, others[0]))
        raise VendorClashError(what=f"the graph engine {name!r}", first=first, second=second)
    probe = discovery.probe(vendor)
    if not probe.available:
        raise EngineUnavailableError(
            engine=name, reason=probe.reason, available=", ".join(_names()) or "none"
        )
    return _loaded(vendor, name)


def provider_of(engine: str) -> str | None:
    """The name of the vendor that ``find_engine`` takes this engine from; None where none has it."""
    return next((vendor.name for vendor in discovery.loadable() if engine in vendor.engines), None)


_engines: dict[
    tuple[str, str], Engine
] = {}  # by the vendor's name and their own: others may have an engine so named
_lock = threading.RLock()


def _loaded(vendor: Any, name: str) -> Engine:
    with _lock:  # an engine is one, whoever asks for it first: it holds devices and what it compiled
        if (vendor.name, name) not in _engines:
            try:
                _engines[vendor.name, name] = vendor.load_engine(name)
            except DlinferError:
                raise
            except Exception as cause:  # a plugin's code may fail in any way
                detail = f"{type(cause).__name__}: {cause}"
                raise VendorLoadError(
                    vendor=vendor.name, source=f"its engine {name!r}", detail=detail
                ) from cause
        return _engines[vendor.name, name]


def _names() -> list[str]:
    return sorted(name for vendor in discovery.loadable() for name in vendor.engines)
