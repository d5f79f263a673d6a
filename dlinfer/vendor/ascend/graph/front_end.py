"""torchair, the vendor's front end: it converts a graph of fake tensors into a graph of GE and runs it."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dlinfer.graph.torch_private.fake_mode import (
    FakeTensorMode,
    fresh_mode,
    mode_of,
    trace_decomposed,
)
from dlinfer.vendor.ascend import sdk
from dlinfer.vendor.ascend.graph.lowerings import table


@dataclass(frozen=True)
class Converted:
    """A graph compiled by torchair.

    run: takes the graph's inputs and returns the tuple of its outputs. The first call loads the graph onto the card.
    model: the graph as torchair's protobuf message.
    """

    run: Callable[..., tuple[Any, ...]]
    model: Any


def load() -> Any:
    """Import ``torchair``. Raises ImportError with the vendor's own message."""
    sdk.load()
    torchair = importlib.import_module("torchair")
    for version in ("", "_v2"):  # they define the op with lengths as tensors
        importlib.import_module(f"torchair.ops._npu_fused_infer_attention_score{version}")
    return torchair


def convert(function: Callable[..., Any], inputs: Sequence[Any]) -> Converted:
    """Convert a function of fake tensors and symbolic numbers to a graph of GE.

    Raises torchair's own error for an op without a converter. These errors have no common base class.
    """
    compiler = load().get_compiler()
    mode = _mode_of(inputs)
    graph_module = trace_decomposed(function, inputs, mode, table())
    _drop_own_parts(graph_module)
    _drop_unread(graph_module)
    with mode:
        compiled = compiler(graph_module, list(inputs))
    return Converted(compiled, compiled.runner.graph)


def _mode_of(inputs: Sequence[Any]) -> FakeTensorMode:
    try:
        return mode_of(inputs)
    except StopIteration:  # there are only sizes
        return fresh_mode()


def _drop_own_parts(graph_module: fx.GraphModule) -> None:
    """Remove copies of a part of a tensor onto the same part of that tensor.

    They occur with a latent cache: its values are a part of its keys, and were written with the keys.
    """
    aten = torch.ops.aten
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        whole, part, *where = node.args
        own = isinstance(part, fx.Node) and part.target is aten.slice.Tensor and part.args[0] is whole
        if own and _slice(*part.args[1:]) == _slice(*where):
            node.replace_all_uses_with(whole)


def _slice(dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> tuple[Any, ...]:
    """Return the four numbers of a slice, so that slices with and without defaults compare equal."""
    return dim, start or 0, end, step


def _drop_unread(graph_module: fx.GraphModule) -> None:
    """Remove nodes whose results nothing reads.

    An example is an ``empty`` for the output of attention: the lowering of attention returns a new tensor instead.
    """
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
