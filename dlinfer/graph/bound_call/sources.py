"""Dynamo's source expressions: they read from the arguments ``L`` and the globals ``G`` of a traced function."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from dlinfer.graph.torch_private.dynamo import source_name

Scope = Mapping[str, Mapping[str, object]]
"""The values of ``L`` and ``G`` in a call. ``L['self']`` is the function's owner."""

ABSENT = (KeyError, AttributeError, IndexError, TypeError)
"""The errors that ``evaluate`` may raise if an expression has no value in a scope, such as a missing attribute."""

_EXPRESSION = re.compile(
    r"L\['(\w+)'\](\.(?:size|stride|storage_offset)\(\)|\.\w+|\['\w+'\]|\[\d+\])*|G\['\w+'\]"
)


class Traced:
    """A function as Dynamo traces it; for a module, its forward.

    owner: the module, or the object of a bound method. receiver: the owner's name in the signature, such as ``self``.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        is_module = isinstance(function, nn.Module)
        self.method: Callable[..., object] = function.forward if is_module else function
        self.owner: object = function if is_module else getattr(function, "__self__", None)
        self.parameters = inspect.signature(self.method).parameters
        plain = getattr(self.method, "__func__", None)
        names = () if plain is None else inspect.signature(plain).parameters
        self.receiver = next(iter(names), "self")
        self._globals: Mapping[str, object] = getattr(inspect.unwrap(self.method), "__globals__", {})

    def scope(self, kwargs: Mapping[str, object]) -> Scope:
        defaults = {name: parameter.default for name, parameter in self.parameters.items()}
        return {"L": defaults | dict(kwargs) | {"self": self.owner}, "G": self._globals}


def root(source: str) -> str:
    """Return the name of the argument that an expression reads from. Empty if it reads a global or cannot be parsed."""
    match = _EXPRESSION.fullmatch(source)
    return match[1] or "" if match else ""


def is_argument(source: str) -> bool:
    """Return whether an expression is an argument itself, not the owner or a value in an argument."""
    return source == f"L[{root(source)!r}]" != "L['self']"


def is_steady(source: str, steady: Collection[str]) -> bool:
    """Return whether an expression reads from the function's owner, or from an argument or value in ``steady``."""
    name = source_name(source)
    return any(
        name == prefix or name.startswith((f"{prefix}.", f"{prefix}[")) for prefix in ("self", *steady)
    )


def evaluate(source: str, scope: Scope) -> Any:
    """Return an expression's value. Raises one of ABSENT if there is none, and KeyError for an unknown expression."""
    if not _EXPRESSION.fullmatch(source):
        raise KeyError(source)
    return eval(source, {"__builtins__": {}}, dict(scope))
