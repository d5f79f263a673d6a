"""The backends that the matrices run, by name: torch's and dlinfer's registered ones, and capture alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.graph.capture.trace import capture
from dlinfer.graph.passes.pipeline import run_passes
from dlinfer.graph.passes.registry import passes
from dlinfer.graph.torch_private import dynamo

ENGINE_OPTIONS = {"small_regions": "engine", "fallback": "allow"}
"""Every op goes to the engine however small its graph is; what the engine refuses is counted."""

Compiler = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Lane:
    """One way to run the op database.

    backend: what is tested. judge: what must be right for a difference to count as wrong: Dynamo without a backend,
    or plain inductor; some ops are random, some samples are refused by Dynamo. dtypes, most: how many samples of
    what. dynamic: as ``torch.compile`` takes it; True makes every size a symbol at once. unbacked: whether Dynamo
    captures ops whose result or its size depends on values, where it would break the graph by default.
    """

    title: str
    backend: str
    judge: str
    dtypes: tuple[str, ...]
    most: int | None = None
    dynamic: bool | None = None
    unbacked: bool = False
    options: Mapping[str, Any] | None = None


LANES = {
    "capture": Lane(
        "All float32 and bfloat16 samples through capture and passes, run by FX",
        backend="capture",
        judge="eager",
        dtypes=("float32", "bfloat16"),
    ),
    "symbolic": Lane(
        "Ten float32 samples an op through capture and passes with symbolic sizes, unbacked ones included, run by FX",
        backend="capture",
        judge="eager",
        dtypes=("float32",),
        most=10,
        dynamic=True,
        unbacked=True,
    ),
    "engine": Lane(
        "One float32 sample an op through the engine, small-region rule off",
        backend="dlinfer",
        judge="inductor",
        dtypes=("float32",),
        most=1,
        options=ENGINE_OPTIONS,
    ),
}


def capture_only(
    graph_module: torch.fx.GraphModule, example_inputs: list[Any], **_: Any
) -> Callable[..., Any]:
    """Capture and passes, then the graph as FX runs it: no partition, no engine, no fallback."""
    mode = dynamo.dynamo_fake_mode()
    assert mode is not None
    captured = capture(graph_module, dynamo.fakes_of_inputs(mode, example_inputs), mode)
    run_passes(captured.graph_module, passes())
    return captured.graph_module.forward


def compiler(name: str) -> Compiler | str:
    """What ``torch.compile(backend=...)`` takes for a name."""
    return capture_only if name == "capture" else name
