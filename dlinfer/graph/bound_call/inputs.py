"""What a compiled call reads from its arguments: expressions, and a port for each."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from dlinfer.graph.interface.ports import ANY_NUMBER, Port, bounds_of
from dlinfer.graph.ir.conj_neg import is_lazy
from dlinfer.graph.ir.device import HOST
from dlinfer.graph.torch_private.dynamo import source_name
from dlinfer.graph.torch_private.expressions import Size, parse_size
from dlinfer.graph.torch_private.symbols import fixed_size


def port_of(source: str, example: Any, value: Any, steady: Collection[str]) -> Port:
    """The port of a graph input with this fake, which was read from ``source`` as ``value``."""
    name, held = source_name(source), is_steady(source, steady)
    if not isinstance(example, torch.Tensor):
        return number_port(source)
    sizes = tuple(None if (size := fixed_size(one)) is None else parse_size(size) for one in example.shape)
    strides = None if value.is_contiguous() else tuple(map(parse_size, value.stride()))
    lazy = is_lazy(value)
    return Port(
        name, value.dtype, sizes, bounds_of(sizes, {}), value.device, strides, held=held, resolved=lazy
    )


def number_port(source: str, size: Size | None = None) -> Port:
    """The port of an integer that is read from ``source``."""
    return Port(source_name(source), torch.int64, (size,), (ANY_NUMBER,), torch.device(HOST), number=True)


_EXPRESSION = re.compile(r"L\['(\w+)'\](\.(?:size|stride|storage_offset)\(\)|\.\w+|\['\w+'\]|\[\d+\])*")


def root(source: str) -> str:
    """The argument that an expression reads from; empty for an expression of another form."""
    found = _EXPRESSION.fullmatch(source)
    return found.group(1) if found else ""


def evaluate(source: str, given: Mapping[str, Any]) -> Any:
    """The value of an expression over ``L``: attributes and items only. Raises KeyError on another form."""
    if not root(source):
        raise KeyError(source)
    return eval(source, {"__builtins__": {}}, {"L": given})


def is_steady(source: str, steady: Collection[str]) -> bool:
    """Whether an expression reads from the function's owner or something named in ``steady``."""
    name = source_name(source)
    return any(name == one or name.startswith((f"{one}.", f"{one}[")) for one in ("self", *steady))
