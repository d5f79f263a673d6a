"""Compiled calls on disk: a second process starts without capturing or compiling.

Dynamo alone needs seconds for a large model. An adaptor that can say what a graph depends on (the model's code and
configuration, the phase, dtypes) finds the compiled call under that identity and runs it after a look at its inputs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.bound_call.call import BoundCall, capture_call, method_of
from dlinfer.graph.bound_call.constants import Constant
from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.cache.key import Key
from dlinfer.graph.codec.interface import read_interface, write_interface
from dlinfer.graph.debug import show
from dlinfer.graph.engine import find_engine, provider_of
from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.report import LOADED, GraphReport, record
from dlinfer.settings import cache_folder
from dlinfer.vendor import discovery


def compile_call(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    *,
    identity: str,
    steady: Sequence[str] = (),
    options: CompileOptions | None = None,
) -> tuple[BoundCall, torch.Tensor, bool]:
    """Compile ``function`` for calls like this one and run it: (compiled, its result, whether it was on disk).

    identity: text that tells everything the graph depends on besides torch, dlinfer, the CPU and the options.
    steady: arguments that are the same objects at each call (KV caches); see ``capture_call``.
    Raises CaptureError where the function is not one graph that gives one tensor.
    """
    chosen = options or CompileOptions()
    store = CallStore(chosen, function, steady, identity, _device(function, kwargs))
    call = store.load()
    misfit = store.why_missed() if call is None else _misfit(call, kwargs)
    if call is not None and not misfit:
        record(call.report)
        with torch.no_grad():
            return call, call(**kwargs), True
    call, result = capture_call(function, kwargs, steady=steady, options=chosen)
    call.report.not_loaded = misfit
    store.keep(call)
    return call, result, False


def _misfit(call: BoundCall, kwargs: Mapping[str, Any]) -> str:
    """Why a stored call is not one for these arguments; empty where it is."""
    try:
        call.check(kwargs)
    except ArtifactInputError as error:
        show("cache", "a stored call does not fit", f"  {error}")
        return str(error)
    return ""


def _device(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Where the call runs, told from its arguments and its owner's parameters and buffers."""
    owner = method_of(function)[1]
    weights = (*owner.parameters(), *owner.buffers()) if isinstance(owner, torch.nn.Module) else ()
    return graph_device((*tree_leaves(dict(kwargs)), *weights))


class CallStore:
    """The place of one compiled call in the disk cache."""

    def __init__(
        self,
        options: CompileOptions,
        function: Callable[..., Any],
        steady: Sequence[str],
        identity: str,
        device: torch.device,
    ) -> None:
        self.folder = options.cache_dir or cache_folder()
        self.cache = ArtifactCache(self.folder, "calls")
        self.function = function
        self.steady = frozenset(steady)
        self.engine = find_engine(options.wanted_engine, device.type)
        self.key = self._key(options, identity, device)

    def _key(self, options: CompileOptions, identity: str, device: torch.device) -> Key:
        active = discovery.activate_default(device.type)
        vendors = {provider_of(self.engine.name), active and active.name}
        method = method_of(self.function)[0]
        return Key(
            kind="call",
            subject=f"{method.__module__}.{method.__qualname__}",
            environment=environment(filter(None, vendors)),
            content=tuple(identity.split("\n")),
            device=str(device),
            engine=self.engine.name,
            engine_identity=self.engine.identity(self.folder),
            engine_options=options.wanted_engine_options,
            options=options.identity(),
            disabled_passes=tuple(sorted(options.disabled_passes)),
            steady=tuple(sorted(self.steady)),
        )

    def load(self) -> BoundCall | None:
        """The stored call; None where there is no sound one."""
        return self.cache.load(self.key, self._read)

    def why_missed(self) -> str:
        """In what the nearest stored call differs; empty where there is none."""
        return self.cache.why_missed(self.key)

    def keep(self, call: BoundCall) -> bool:
        """Store a call; False where a part of it cannot be stored."""
        return self.cache.store(self.key, lambda: _written(call))

    def _read(self, contents: bytes) -> BoundCall:
        data = json.loads(contents)
        interface = read_interface(data["interface"])
        program = CompiledGraph.from_dict(data["graph"], self.engine, self.folder)
        report = GraphReport.from_dict(data["report"])
        report.cause, report.not_loaded = LOADED, ""
        constants = [Constant(source, value) for source, value in data["constants"]]
        return BoundCall(self.function, program, interface, data["sources"], self.steady, report, constants)


def _written(call: BoundCall) -> bytes:
    data = {
        "sources": list(call.sources),
        "interface": write_interface(call.interface),
        "constants": [astuple(constant) for constant in call.constants],
        "graph": call.program.to_dict(),
        "report": call.report.to_dict(),
    }
    return json.dumps(data).encode()
