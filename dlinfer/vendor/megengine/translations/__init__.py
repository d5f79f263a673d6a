"""Translations of torch's ops into a node list.

``translate`` adds a node to the list. ``refusal`` gives the reason if a node has no translation."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.dialect import arguments, fake, overload, tensors_of
from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value
from dlinfer.vendor.megengine.translations import activations as activations
from dlinfer.vendor.megengine.translations import arithmetic as arithmetic
from dlinfer.vendor.megengine.translations import attention as attention
from dlinfer.vendor.megengine.translations import norms as norms
from dlinfer.vendor.megengine.translations import places as places
from dlinfer.vendor.megengine.translations import products as products
from dlinfer.vendor.megengine.translations import rotary as rotary
from dlinfer.vendor.megengine.translations.table import TABLE


def translate(writer: NodeList, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Translate a node of a graph into the list. Return its result, or a list of results. Raises UntranslatableError.

    value_of: a function that returns the result of an earlier node."""
    if node.target is operator.getitem:
        return value_of(node.all_input_nodes[0])[node.args[1]]
    function = TABLE.get(overload(node))
    if function is None:
        raise UntranslatableError("no translation to MegEngine")
    values = {name: map_arg(value, value_of) for name, value in arguments(node).items()}
    return function(writer, fake(node), **values)


def refusal(node: fx.Node) -> str | None:
    """Return a reason not to run a node in MegEngine, if it has no translation; else None.

    To find out, the function translates the node alone into a new list."""
    writer, values = NodeList(), {}

    def value_of(parent: fx.Node) -> Any:
        if parent not in values:
            values[parent] = _stand_in(writer, parent)
        return values[parent]

    for tensor in tensors_of(node):
        if tensor.dtype not in (torch.float32, torch.bool):
            kind = str(tensor.dtype).removeprefix("torch.")
            return f"its result is {kind}, which MegEngine computes as int32"
    try:
        translate(writer, node, value_of)
    except UntranslatableError as error:
        return str(error)
    return None


def _stand_in(writer: NodeList, parent: fx.Node) -> Any:
    result, values = fake(parent), []
    several = isinstance(result, (list, tuple))
    for index, tensor in enumerate(result if several else [result]):
        if not isinstance(tensor, Tensor):
            raise UntranslatableError("an operand is not a tensor")
        value = Value(f"{parent.name}_{index}", tuple(tensor.shape), tensor.dtype)
        if parent.op in ("placeholder", "get_attr"):
            writer.inputs.append((value.name, value.shape, ""))
        values.append(value)
    return values if several else values[0]
