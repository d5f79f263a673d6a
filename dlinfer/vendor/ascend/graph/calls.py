"""Checks of input values before a graph runs: the graph cannot check them, and the card reports no bad values."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.functional.functional_ops import functional_op
from dlinfer.ops.attention.kv_cache import check_slots

Check = Callable[[Sequence[Any]], None]
"""Takes the inputs of a region. Raises OpArgumentError for a slot beyond the cache, RefusedError for other values."""

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
"""Ops whose result holds the same numbers as their first argument."""


def checks_of(graph_module: fx.GraphModule) -> list[Check]:
    """Return the checks of input values that the calls in a graph need. Layers with the same tensors share one check.

    Raises RefusedError if the region computes a value to check, instead of taking it as an input.
    """
    graph = graph_module.graph
    index = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    checks: dict[tuple[Any, ...], Check] = {}
    fill = _twin("fill_kv_cache")
    for node in graph.find_nodes(op="call_function", target=fill):
        slots, cache = _origin(node.args[4]), _first(node.args[2], fill)
        if slots not in index or cache not in index:
            raise RefusedError("the region computes slots or caches of fill_kv_cache")
        checks.setdefault(("slots", slots), _slot_check(index[slots], index[cache]))
    for name, place in (("prefill_attention", 3), ("paged_prefill_attention", 5)):
        for node in graph.find_nodes(op="call_function", target=_twin(name)):
            ends, lengths = (_origin(source) for source in node.args[place : place + 2])
            if ends not in index or lengths not in index:
                raise RefusedError(f"the region computes lengths of {name}")
            checks.setdefault(("lengths", ends, lengths), _length_check(index[ends], index[lengths]))
    return list(checks.values())


def _slot_check(slots: int, cache: int) -> Check:
    def check(inputs: Sequence[Any]) -> None:
        flat: Tensor = inputs[slots].reshape(-1)
        check_slots(flat, inputs[cache])
        if bool((flat < 0).any()):
            raise RefusedError(
                "some slots are negative (padding), but npu_scatter_pa_kv_cache needs slots of at least 0"
            )

    return check


def _length_check(ends: int, lengths: int) -> Check:
    def check(inputs: Sequence[Any]) -> None:
        queries, keys = int(inputs[ends]), int(inputs[lengths])
        if not 0 < queries <= keys:
            raise RefusedError(
                f"a prompt has {queries} queries and {keys} keys, but each query needs to see a key"
            )

    return check


def _twin(name: str) -> Any:
    return functional_op(getattr(torch.ops.dlinfer, name).default)


def _origin(node: object) -> object:
    while isinstance(node, fx.Node) and node.target in _SAME_NUMBERS:
        node = node.args[0]
    return node


def _first(node: object, fill: object) -> object:
    """Follow a cache back through the calls of ``fill`` that wrote to it, and return it as it was before them."""
    node = _origin(node)
    while isinstance(node, fx.Node) and node.op == "call_function":
        call, position = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not isinstance(call, fx.Node) or call.target is not fill or not isinstance(position, int):
            return node
        node = _origin(call.args[2 + position])
    return node
