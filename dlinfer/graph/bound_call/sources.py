"""Dynamo's source expressions, over the arguments ``L`` and the globals ``G`` of the function that it traces."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from dlinfer.graph.torch_private.dynamo import source_name

Scope = Mapping[str, Mapping[str, Any]]
"""The values of ``L`` and ``G`` in a call. The function's owner is ``L['self']``."""

ABSENT = (KeyError, AttributeError, IndexError, TypeError)
"""The errors of ``evaluate`` for an expression without a value."""

_EXPRESSION = re.compile(
    r"L\['(\w+)'\](\.(?:size|stride|storage_offset)\(\)|\.\w+|\['\w+'\]|\[\d+\])*|G\['\w+'\]"
)


class Traced:
    """A function as Dynamo traces it: a module by its forward.

    owner: the module, or the object of a bound method. receiver: the name of the owner in the function's signature.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        is_module = isinstance(function, nn.Module)
        self.method: Callable[..., object] = function.forward if is_module else function
        self.owner: object = function if is_module else getattr(function, "__self__", None)
        self.parameters = inspect.signature(self.method).parameters
        plain = getattr(self.method, "__func__", None)
        names = () if plain is None else inspect.signature(plain).parameters
        self.receiver = next(iter(names), "self")
        self._globals: Mapping[str, Any] = getattr(inspect.unwrap(self.method), "__globals__", {})

    def scope(self, kwargs: Mapping[str, Any]) -> Scope:
        """The scope of a call with these arguments."""
        defaults = {name: parameter.default for name, parameter in self.parameters.items()}
        return {"L": defaults | dict(kwargs) | {"self": self.owner}, "G": self._globals}


def root(source: str) -> str:
    """The argument that an expression reads from; empty for a global or an expression of another form."""
    match = _EXPRESSION.fullmatch(source)
    return match[1] or "" if match else ""


def is_argument(source: str) -> bool:
    """Whether an expression is an argument of the function itself."""
    return source == f"L[{root(source)!r}]" != "L['self']"


def is_steady(source: str, steady: Collection[str]) -> bool:
    """Whether an expression reads from the function's owner or something named in ``steady``."""
    name = source_name(source)
    return any(
        name == prefix or name.startswith((f"{prefix}.", f"{prefix}[")) for prefix in ("self", *steady)
    )


def evaluate(source: str, scope: Scope) -> Any:
    """The value of an expression. Raises one of ABSENT where it has none, KeyError on another form."""
    if not _EXPRESSION.fullmatch(source):
        raise KeyError(source)
    return eval(source, {"__builtins__": {}}, dict(scope))
