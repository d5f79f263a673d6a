"""Keep bound calls on disk, so that a second process starts without capturing or compiling.

Dynamo's capture alone takes seconds for a large model. So an adaptor describes the function by an identity: a text with
everything that the graph depends on, such as the model's code, its configuration and its dtypes. If the disk cache has
a bound call with the same identity, and the arguments fit it, the stored bound call runs.
"""

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._pytree import tree_leaves

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.bound_call.call import BoundCall
from dlinfer.graph.bound_call.capture import capture_call
from dlinfer.graph.bound_call.sources import Traced
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
    function: Callable[..., object],
    kwargs: Mapping[str, object],
    *,
    identity: str,
    steady: Sequence[str] = (),
    options: CompileOptions | None = None,
) -> tuple[BoundCall, torch.Tensor, bool]:
    """Load the bound call of ``function`` from disk, or compile it for arguments like ``kwargs``. Then run it once.

    Return three things: the bound call, the result of the run, and whether the bound call came from disk.
    identity: a text with everything that the graph depends on, except torch, dlinfer, the CPU and the options.
    steady: names of arguments that are the same object at each call, such as KV caches; see ``capture_call``.
    Raises CaptureError if the function is not one graph that returns one tensor.
    """
    chosen = options or CompileOptions()
    traced = Traced(function)
    owner = traced.owner
    weights = (*owner.parameters(), *owner.buffers()) if isinstance(owner, torch.nn.Module) else ()
    device = graph_device((*tree_leaves(dict(kwargs)), *weights))
    store = CallStore(chosen, function, steady, identity, device)
    call = store.cache.load(store.key, store.read)
    misfit = store.cache.why_missed(store.key) if call is None else _misfit(call, kwargs)
    if call is not None and not misfit:
        record(call.report)
        with torch.no_grad():
            return call, call(**kwargs), True
    new, result = capture_call(function, kwargs, steady=steady, options=chosen)
    new.report.not_loaded = misfit
    store.cache.store(store.key, lambda: _written(new))
    return new, result, False


def _misfit(call: BoundCall, kwargs: Mapping[str, object]) -> str:
    """Return a reason not to run a stored call with the arguments ``kwargs``; empty if they fit."""
    try:
        call.check(kwargs)
    except ArtifactInputError as error:
        show("cache", "a stored call does not fit", f"  {error}")
        return str(error)
    return ""


class CallStore:
    """One compiled call's place in the disk cache."""

    def __init__(
        self,
        options: CompileOptions,
        function: Callable[..., object],
        steady: Sequence[str],
        identity: str,
        device: torch.device,
    ) -> None:
        self._folder = options.cache_dir or cache_folder()
        self._function, self._steady = function, frozenset(steady)
        self._engine = find_engine(options.wanted_engine, device.type)
        self.cache = ArtifactCache(self._folder, "calls")
        active = discovery.activate_default(device.type)
        vendors = {provider_of(self._engine.name), active and active.name}
        method = Traced(function).method
        self.key = Key(
            kind="call",
            subject=f"{method.__module__}.{method.__qualname__}",
            environment=environment(filter(None, vendors)),
            content=tuple(identity.split("\n")),
            device=str(device),
            engine=self._engine.name,
            engine_identity=self._engine.identity(self._folder),
            engine_options=options.wanted_engine_options,
            options=options.identity(),
            disabled_passes=tuple(sorted(options.disabled_passes)),
            steady=tuple(sorted(self._steady)),
        )

    def read(self, contents: bytes) -> BoundCall:
        """Restore a bound call from stored bytes. Damaged bytes raise an error of any type."""
        data = json.loads(contents)
        program = CompiledGraph.from_dict(data["graph"], self._engine, self._folder)
        report = GraphReport.from_dict(data["report"])
        report.cause, report.not_loaded = LOADED, ""
        interface = read_interface(data["interface"])
        return BoundCall(
            self._function, program, interface, data["sources"], data["hooks"], self._steady, report
        )


def _written(call: BoundCall) -> bytes:
    data = {
        "sources": list(call.sources),
        "hooks": list(call.hooks),
        "interface": write_interface(call.interface),
        "graph": call.program.to_dict(),
        "report": call.report.to_dict(),
    }
    return json.dumps(data).encode()
