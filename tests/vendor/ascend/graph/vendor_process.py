"""A process in which the vendor's own torchair writes graphs, and the interpreter stands where its engine would.

For processes with the real torch_npu on stubs (``run_checks``). What is replaced of torchair is its way to the card:
starting the engine, the question which ops the installed CANN has, and loading, compiling and running a graph.
"""

import importlib
from typing import Any

from dlinfer.vendor.ascend import chips, sdk
from dlinfer.vendor.ascend.graph import engine
from dlinfer.vendor.base import Probe
from tests.vendor.ascend.graph.interpreter.run import Graph

loaded: list[Any] = []
"""The messages of the graphs that were loaded, the last one last."""


def prepare() -> None:
    """Once a process, before the engine is chosen. The engine is told to read the host's tensors, which these are."""
    _module("torch_npu").npu.get_device_name = lambda device=None: "Ascend910B2"
    _module("torchair._ge_concrete_graph.fx2ge_converter").initialize_graph_engine = _nothing
    _module("torchair._ge_concrete_graph.compat_ir").is_cann_compat = lambda *args, **kwargs: ""
    backend = _module("torchair.core._backend")
    backend._cached_device_id = 0
    backend.TorchNpuGraph.load = _load
    backend.TorchNpuGraph.compile = _nothing
    backend.TorchNpuGraph.run = _run
    sdk.probe = lambda: Probe(True, "the vendor's package on stubs, with an interpreter for its engine")
    chips.current = lambda: chips.A2  # pyright: ignore[reportAttributeAccessIssue]
    engine.AscendEngine.device_type = "cpu"


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The card's part, which is not here."""


def _load(self: Any, graph: Any, options: Any = None) -> None:
    messages = importlib.import_module("torchair._ge_concrete_graph.ge_ir_pb2")
    model = messages.ModelDef()
    model.ParseFromString(graph.SerializeToString())  # what the engine would get
    self.interpreted = Graph(model.graph[0])
    loaded.append(model.graph[0])


def _run(self: Any, inputs: Any, assigned_outputs: Any = (), stream: Any = None) -> list[Any]:
    """As the engine does: an output that is assigned goes into that tensor's memory."""
    results = self.interpreted.run(inputs)
    for index, target in enumerate(assigned_outputs or ()):
        if target is not None:
            if results[index].data_ptr() != target.data_ptr():
                target.copy_(results[index])
            results[index] = target
    return results
