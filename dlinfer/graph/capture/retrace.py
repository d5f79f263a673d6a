"""Re-trace a graph with other fake inputs."""

from collections.abc import Callable, Mapping

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.dialect import attribute, call_on_fakes, fake
from dlinfer.graph.torch_private.fake_mode import FakeTensorMode, symbolic


class RetraceError(Exception):
    """The graph cannot be re-traced with these fake inputs."""


def retrace(
    graph_module: fx.GraphModule, inputs: Mapping[fx.Node, object], mode: FakeTensorMode
) -> fx.GraphModule:
    """Return a copy of a graph. Each node of the copy has a fake of ``mode`` as its result.

    inputs: placeholder -> its new value: a fake or a symbolic number of ``mode``, or a constant.
    The copy keeps names, order, meta and constants. Raises RetraceError if an op fails on the fakes, for example
    because it depends on an unknown size.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    constants: dict[str, object] = {}
    for node in graph_module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            copy.meta["val"] = inputs[node]
        elif node.op == "get_attr":
            constants[str(node.target)] = attribute(graph_module, str(node.target))
            copy.meta["val"] = _fake_constant(constants[str(node.target)], mode)
        elif node.op == "call_function":
            try:
                copy.meta["val"] = fake_result(copy, mode)
            except Exception as cause:  # an op's fake function may raise anything
                raise RetraceError(f"{node.name}: {cause}") from cause
    return fx.GraphModule(constants, graph, "graph")


def fake_result(
    node: fx.Node,
    mode: FakeTensorMode,
    check: Callable[[Callable[..., object], tuple[object, ...], Mapping[str, object]], None] | None = None,
) -> object:
    """Run a node's call on the fakes of its arguments, and return the result.

    check: called before the run with the node's target, args and kwargs; it may raise.
    """
    assert callable(node.target)
    args, kwargs = map_arg((node.args, node.kwargs), fake)
    if check is not None:
        check(node.target, args, kwargs)
    with symbolic(mode):
        return call_on_fakes(node.target, args, kwargs)


def _fake_constant(value: object, mode: FakeTensorMode) -> torch.Tensor:
    if type(value) is not torch.Tensor:
        raise RetraceError(f"a constant is a {type(value).__name__}")
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
