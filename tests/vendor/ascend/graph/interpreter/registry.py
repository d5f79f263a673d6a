"""The ops that the interpreter knows, each with its inputs and attributes by name."""

import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class GraphError(RuntimeError):
    """A graph that the card's engine would refuse, or that the interpreter does not know enough of."""


@dataclass(frozen=True)
class Op:
    """An op type: its inputs are the positional parameters of ``function`` (``else_`` is ``else``), its attributes
    the keyword-only ones.

    lists: inputs that are lists of tensors (DYNAMIC_INPUT).
    """

    function: Callable[..., Any]
    lists: frozenset[str]

    def call(self, inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> Any:
        """Raises GraphError for an input or attribute that it does not have, and for a missing one."""
        inputs = {f"{name}_" if keyword.iskeyword(name) else name: value for name, value in inputs.items()}
        parameters = inspect.signature(self.function).parameters.values()
        keyword_only = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
        positional = {one.name for one in parameters} - keyword_only
        needed = {one.name for one in parameters if one.default is one.empty}
        for what, given, known in (("input", inputs, positional), ("attribute", attributes, keyword_only)):
            if unknown := set(given) - known:
                raise GraphError(f"no {what} {', '.join(sorted(unknown))}")
            if missing := (needed & known) - set(given):
                raise GraphError(f"{what} {', '.join(sorted(missing))} is missing")
        return self.function(**inputs, **attributes)


OPS: dict[str, Op] = {}


def op(name: str, *, lists: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as what an op type computes. lists: its inputs that are lists of tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS[name] = Op(function, frozenset(lists.split()))
        return function

    return register
