"""Capturing code into a dialect graph, fusing it, showing it as text and running it: what tests of rules share.

norm = captured(LlamaRMSNorm(64), torch.randn(2, 5, 64))
before, want = graph_text(norm.graph_module), norm.run()
assert norm.fuse(RMS_NORM) == 1
torch.testing.assert_close(norm.run(), want)
"""

import copy
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dlinfer.graph.capture.trace import capture
from dlinfer.graph.ir.dialect import STATIC, fake, is_pure, is_size, op_name
from dlinfer.graph.passes.pipeline import Pass, verify
from dlinfer.graph.passes.rewriter import Edit, RefusedMatch
from dlinfer.graph.torch_private import dynamo
from tests.graph.passes.fakes import stale_fakes


@dataclass
class CapturedGraph:
    """A dialect graph with the real inputs of the call that it was captured from."""

    graph_module: fx.GraphModule
    inputs: tuple[Any, ...] = ()
    edits: list[Edit] = field(default_factory=list)
    refused: list[RefusedMatch] = field(default_factory=list)

    def run(self) -> list[torch.Tensor]:
        """The graph's outputs on copies of its inputs, followed by those inputs that the graph has written."""
        self.graph_module.recompile()
        given = copy.deepcopy(self.inputs)  # one call, so that inputs which share memory still do
        with torch.no_grad():
            outputs = self.graph_module(*given)
        written = [
            now
            for now, before in zip(given, self.inputs, strict=True)
            if isinstance(now, torch.Tensor) and not torch.equal(now, before)
        ]
        return [*[value for value in outputs if isinstance(value, torch.Tensor)], *written]

    def fuse(self, *rules: Pass) -> int:
        """Apply rules in order and check that the graph is still valid; how often they fired."""
        changes = [change for rule in rules for change in rule.run(self.graph_module)]
        edits = [change for change in changes if isinstance(change, Edit)]
        self.refused += [change for change in changes if isinstance(change, RefusedMatch)]
        verify(self.graph_module, "fusion", None)
        assert not stale_fakes(self.graph_module)
        self.edits += edits
        return len(edits)

    def count(self, name: str) -> int:
        """How many nodes call the op of this name, as in ``dlinfer.rms_norm`` or ``aten.mul.Tensor``."""
        return sum(op_name(node) == name for node in self.graph_module.graph.nodes)

    def strides(self) -> list[str]:
        """The strides of the graph's outputs: a rule must not change them, views may depend on them."""
        outputs = self.graph_module.graph.output_node().all_input_nodes
        return [str(fake(node).stride()) for node in outputs if isinstance(fake(node), torch.Tensor)]


def captured(function: Callable[..., Any], *args: Any, dynamic: bool = True, **kwargs: Any) -> CapturedGraph:
    """Capture a function or module on examples; it must be one graph. ``dynamic``: with symbolic sizes."""
    graphs: list[CapturedGraph] = []

    def backend(dynamo_graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        mode = dynamo.dynamo_fake_mode()
        assert mode is not None
        one = CapturedGraph(capture(dynamo_graph, dynamo.fakes_of_inputs(mode, examples), mode).graph_module)
        graphs.append(one)

        def run(*inputs: Any) -> Any:
            one.inputs = copy.deepcopy(inputs)
            return one.graph_module(*inputs)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    torch._dynamo.reset()
    assert len(graphs) == 1
    return graphs[0]


def graph_text(graph_module: fx.GraphModule) -> str:
    """The graph as text that is the same on every run: a line a node, sizes named s0, s1... as they appear.

    Sizes that only shape other nodes' meta, used by nothing, are left out.
    """
    shown: list[str] = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            shown.append(f"return {_argument(node.args[0])}")
        elif not node.users and (is_size(node) and is_pure(node)):
            continue
        elif node.op == "placeholder":
            if not is_size(node):
                static = " static" if node.meta.get(STATIC) else ""
                shown.append(f"{node.name}: {_type(fake(node))}{static}")
        else:
            arguments = [_argument(arg) for arg in node.args]
            arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
            shown.append(f"{node.name} = {op_name(node)}({', '.join(arguments)}) -> {_type(fake(node))}")
    return "\n".join(_wrapped(line) for line in _with_sizes_renamed("\n".join(shown)).splitlines())


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def fused_text(one: CapturedGraph, *rules: Pass) -> str:
    """The graph before and after rules, for a golden."""
    before = graph_text(one.graph_module)
    one.fuse(*rules)
    return f"{before}\n--->\n{graph_text(one.graph_module)}\n"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item) for item in value)}]"
    if isinstance(value, int) and value == torch.iinfo(torch.int64).max:
        return "end"
    return str(value).removeprefix("torch.")


_SHORT = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{_SHORT.get(dtype, dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_type(item) for item in value)})"
    return str(value)


def _with_sizes_renamed(text: str) -> str:
    names: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda found: names.setdefault(found.group(), f"s{len(names)}"), text)
