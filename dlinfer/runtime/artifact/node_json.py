"""The nodes of a graph as JSON: what they call, and their arguments. Calls come from a closed list, both ways.

A file can name ops of torch's dispatcher in three namespaces and arithmetic on sizes; there is no way to write
down another function, an attribute or a piece of Python.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from dlinfer.graph.torch_private.dispatcher import is_dispatched

NAMESPACES = ("aten", "prims", "dlinfer")

# They read files, print, or are torch's own tests.
_REFUSED = ("aten::from_file", "aten::_print", "aten::_test_")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}", re.ASCII)
_OP = re.compile(r"[A-Za-z0-9_]+::[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?", re.ASCII)

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        "add sub mul floordiv mod truediv neg pos abs eq ne lt le gt ge and_ or_ not_ xor getitem".split()
    )
}
_ARITHMETIC |= {
    f"torch.{name}": getattr(torch, name)
    for name in "sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum".split()
}
_ARITHMETIC |= {"math.ceil": math.ceil, "math.floor": math.floor, "math.trunc": math.trunc, "round": round}
_NAMES = {function: name for name, function in _ARITHMETIC.items()}

_TORCH_NAMES: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format)
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class GraphTextError(ValueError):
    """A graph that cannot be written, or data that is no graph: what is wrong with it."""


def name_of(value: Any) -> str:
    """Return a node's name, which becomes a name in code that is generated from the graph. Raises GraphTextError."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise GraphTextError(f"{value!r} is no name of a node")
    return value


# --- what is called


def call_text(target: Any) -> str:
    """``aten::add.Tensor`` or ``operator.mul``. Raises GraphTextError for any other function."""
    if isinstance(target, OpOverload):
        return target.name()
    if target in _NAMES:
        return _NAMES[target]
    raise GraphTextError(f"{target} has no written form")


def resolve_call(text: Any, allowed: Collection[str] = ()) -> Callable[..., Any]:
    """Return the op or arithmetic that a text names. ``allowed``: names of ops in other namespaces that are trusted.

    Raises GraphTextError for all else, and for an op that this process does not have.
    """
    if not isinstance(text, str):
        raise GraphTextError(f"a call of {type(text).__name__}")
    if text in _ARITHMETIC:
        return _ARITHMETIC[text]
    if not _OP.fullmatch(text):
        raise GraphTextError(f"{text[:80]!r} is no op")
    namespace, _, rest = text.partition("::")
    if namespace not in NAMESPACES and text not in allowed:
        raise GraphTextError(f"op {text} belongs to neither of {', '.join(NAMESPACES)}")
    if text.startswith(_REFUSED):
        raise GraphTextError(f"op {text} is not for graphs")
    if namespace == "dlinfer":
        import dlinfer.ops  # noqa: F401 - registers them
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    known = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    if (overload or "default") not in known or not is_dispatched(text):
        raise GraphTextError(f"this process has no op {text}")
    return getattr(packet, overload or "default")


def check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises GraphTextError where arithmetic is asked of anything but sizes, or an op has no such keyword."""
    if isinstance(function, OpOverload):
        known = {argument.name for argument in function._schema.arguments}
        if not set(kwargs) <= known:
            raise GraphTextError(f"{function} takes no {sorted(set(kwargs) - known)}")
        return
    if kwargs:
        raise GraphTextError(f"{_NAMES[function]} takes no keywords")
    if function is operator.getitem:
        if len(args) != 2 or not isinstance(args[0], (tuple, list)) or type(args[1]) is not int:
            raise GraphTextError("operator.getitem is for results of several tensors")
        return
    numbers = args[0] if function is torch.sym_sum and args else args
    if not all(isinstance(value, _NUMBERS) for value in numbers):
        raise GraphTextError(f"{_NAMES[function]} is for sizes")


# --- its arguments


def encode(value: Any) -> Any:
    """Return an argument as JSON. Raises GraphTextError."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, slice):
        return {"slice": [encode(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, _TORCH_NAMES):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise GraphTextError(f"an argument of type {type(value).__name__} has no written form")


def decode(data: Any, nodes: Mapping[str, Any]) -> Any:
    """Return what ``encode`` gave, with ``nodes`` for the names of nodes. Raises GraphTextError."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [decode(item, nodes) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise GraphTextError("an argument of no known kind")
    ((kind, content),) = data.items()
    if kind == "node" and isinstance(content, str):
        if content not in nodes:
            raise GraphTextError(f"node {content[:80]!r} is not there, or comes later")
        return nodes[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(decode(item, nodes) for item in content)
    if kind == "slice" and isinstance(content, list) and len(content) == 3:
        return slice(*(decode(item, nodes) for item in content))
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == "torch":
        return torch_name(content, _TORCH_NAMES)
    if kind == "device":
        return device_of(content)
    raise GraphTextError(f"an argument of unknown kind {str(kind)[:40]!r}")


def torch_name(content: Any, kinds: tuple[type, ...]) -> Any:
    """torch's dtype, layout or memory format of a name. Raises GraphTextError."""
    value = getattr(torch, content, None) if isinstance(content, str) and _NAME.fullmatch(content) else None
    if not isinstance(value, kinds):
        raise GraphTextError(f"{str(content)[:40]!r} is no {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def dtype_of(content: Any) -> torch.dtype:
    """Return the dtype of a name. Raises GraphTextError."""
    return torch_name(content, (torch.dtype,))


def device_of(content: Any) -> torch.device:
    """Return the device of a name. Raises GraphTextError."""
    try:
        return torch.device(content if isinstance(content, str) else "")
    except RuntimeError:
        raise GraphTextError(f"{str(content)[:40]!r} is no device") from None
