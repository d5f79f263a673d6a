"""Compiled calls on disk: a second process starts without capturing or compiling.

Dynamo alone needs seconds for a large model. An adaptor that can say what a graph depends on (the model's code and
configuration, the phase, dtypes) finds the compiled call under that identity and runs it after a look at its inputs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.graph.direct.call import DirectCall, capture_call
from dlinfer.graph.direct.inputs import Assumption, InputSpec
from dlinfer.graph.engine import find_engine
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.report import LOADED, GraphReport, record
from dlinfer.settings import cache_folder


def compile_call(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    *,
    identity: str,
    steady: Sequence[str] = (),
    options: CompileOptions | None = None,
) -> tuple[DirectCall, torch.Tensor, bool]:
    """Compile ``function`` for calls like this one and run it: (compiled, its result, whether it was on disk).

    identity: text that tells everything the graph depends on besides torch, dlinfer, the CPU and the options.
    steady: arguments that are the same objects at each call (KV caches); see ``capture_call``.
    Raises CaptureError where the function is not one graph that gives one tensor.
    """
    chosen = options or CompileOptions()
    store = CallStore(chosen, function, steady, identity)
    call = store.load()
    if call is not None and _fits(call, kwargs):
        record(call.report)
        with torch.no_grad():
            return call, call(**kwargs), True
    call, result = capture_call(function, kwargs, steady=steady, options=chosen)
    store.keep(call)
    return call, result, False


def _fits(call: DirectCall, kwargs: Mapping[str, Any]) -> bool:
    try:
        call.check(kwargs)
    except ArtifactInputError:
        return False
    return True


class CallStore:
    """The place of one compiled call in the disk cache."""

    def __init__(
        self, options: CompileOptions, function: Callable[..., Any], steady: Sequence[str], identity: str
    ) -> None:
        self.folder = options.cache_dir or cache_folder()
        self.cache = ArtifactCache(self.folder, "calls")
        self.function = function
        self.steady = frozenset(steady)
        self.engine = find_engine(options.wanted_engine, "cpu")
        chosen = [self.engine.name, self.engine.identity(self.folder)]
        chosen += [options.policy, str(options.keeps_small_regions), str(options.precision)]
        chosen += [f"{name}={value!r}" for name, value in sorted(options.wanted_engine_options.items())]
        self.key = "\n".join([*chosen, *sorted(options.disabled_passes), *steady, identity])

    def load(self) -> DirectCall | None:
        """The stored call; None where there is no sound one."""
        return self.cache.load(self.key, self._read)

    def keep(self, call: DirectCall) -> bool:
        """Store a call; False where a part of it cannot be stored."""
        return self.cache.store(self.key, call, _write)

    def _read(self, path: str) -> DirectCall:
        data = json.loads(Path(path).read_text())
        inputs = [_spec(**item) for item in data["inputs"]]
        assumptions = [Assumption(text, tuple(sources)) for text, sources in data["assumptions"]]
        program = CompiledGraph.from_dict(data["graph"], self.engine, self.folder)
        report = GraphReport.from_dict(data["report"])
        report.cause = LOADED
        return DirectCall(self.function, program, inputs, assumptions, self.steady, report)


def _spec(sizes: list[int | None], strides: list[int] | None, **fields: Any) -> InputSpec:
    return InputSpec(sizes=tuple(sizes), strides=None if strides is None else tuple(strides), **fields)


def _write(call: DirectCall, path: str) -> None:
    data = {
        "inputs": [asdict(spec) for spec in call.inputs],
        "assumptions": [astuple(assumption) for assumption in call.assumptions],
        "graph": call.program.to_dict(),
        "report": call.report.to_dict(),
    }
    Path(path).write_text(json.dumps(data))
