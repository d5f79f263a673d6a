"""What is asked of the slots of a call before its graph runs: the card's scatter takes none that is padding."""

import torch
from torch import Tensor, fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.functional.variants import twin_op
from dlinfer.ops.kv_cache import check_slots

_aten = torch.ops.aten
_SAME_NUMBERS = {
    _aten.view.default,
    _aten.reshape.default,
    _aten.flatten.using_ints,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten._to_copy.default,
    _aten.to.dtype,
}
"""Ops whose result has the numbers of their first argument."""


def of(graph_module: fx.GraphModule) -> list[tuple[int, int]]:
    """(index of the slots, of the keys' cache) among a function's inputs, for each write to a cache.

    Raises RefusedError where slots are computed in the region, and so cannot be looked at before.
    """
    graph = graph_module.graph
    index = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    fill = twin_op(torch.ops.dlinfer.fill_kv_cache.default)
    found: list[tuple[int, int]] = []
    for node in graph.find_nodes(op="call_function", target=fill):
        slots, cache = _origin(node.args[4]), _first(node.args[2], fill)
        if slots not in index or cache not in index:
            raise RefusedError("slots or caches of fill_kv_cache are computed in the region")
        pair = index[slots], index[cache]
        if pair[0] not in [one for one, _ in found]:  # the layers of a step share their slots
            found.append(pair)
    return found


def check(slots: Tensor, cache: Tensor) -> None:
    """Raise OpArgumentError for a slot behind the cache's end, RefusedError for padding."""
    flat = slots.reshape(-1)
    check_slots(flat, cache)
    if bool((flat < 0).any()):
        raise RefusedError("padding among the slots: npu_scatter_pa_kv_cache takes slots from 0 on")


def _origin(node: object) -> object:
    while isinstance(node, fx.Node) and node.target in _SAME_NUMBERS:
        node = node.args[0]
    return node


def _first(node: object, fill: object) -> object:
    """The cache as it came in, before other writes to it."""
    node = _origin(node)
    while isinstance(node, fx.Node) and node.op == "call_function":
        call = node.args[0]
        if not isinstance(call, fx.Node) or call.target is not fill:
            return node
        position = node.args[1]
        node = _origin(call.args[2 + position]) if isinstance(position, int) else node
    return node
