"""Evaluate Dynamo's source expressions, such as ``L['x'].size()[0]`` or ``G['flag']``.

``L`` holds the arguments of a traced function, and ``G`` holds its globals.
"""

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
    """A function as Dynamo traces it. A module is traced as its ``forward``.

    owner: the module, or the object of a bound method.
    receiver: the name of the parameter that takes the owner, such as ``self``.
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
    """Return the name of the argument that an expression reads from.

    The name is empty if the expression reads a global or cannot be parsed.
    """
    match = _EXPRESSION.fullmatch(source)
    return match[1] or "" if match else ""


def is_argument(source: str) -> bool:
    """Return whether an expression reads a whole argument. The owner and values inside an argument do not count."""
    return source == f"L[{root(source)!r}]" != "L['self']"


def is_steady(source: str, steady: Collection[str]) -> bool:
    """Return whether ``source`` reads from the function's owner, or from an argument or value named in ``steady``."""
    name = source_name(source)
    return any(
        name == prefix or name.startswith((f"{prefix}.", f"{prefix}[")) for prefix in ("self", *steady)
    )


def evaluate(source: str, scope: Scope) -> Any:
    """Return the value of ``source`` in ``scope``.

    Raises KeyError if ``source`` has an unknown form. Raises KeyError, AttributeError, IndexError or TypeError
    (``ABSENT``) if the scope has no such value.
    """
    if not _EXPRESSION.fullmatch(source):
        raise KeyError(source)
    return eval(source, {"__builtins__": {}}, dict(scope))
