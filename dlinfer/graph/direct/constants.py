"""What a capture took as constants of the function's owner and of its module: flags, numbers, names, absent hooks.

Dynamo guards them, and a direct call compares them: most in one comparison of two tuples, hooks by torch's count of
all hooks that were ever registered.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.direct.inputs import evaluate, root
from dlinfer.graph.seam.dynamo import source_name

_PLAIN = (bool, int, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class Constant:
    """An expression over ``L`` or ``G`` and the value that it had; of hooks, None: there were none."""

    source: str
    value: Any

    def check(self, given: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
        """Raises ArtifactInputError where it has another value."""
        found = _place(self.source, given, namespace)
        value = found[0].get(found[1], "nothing") if found is not None else "nothing"
        name = source_name(self.source)
        if self.is_hooks:
            if value:
                raise ArtifactInputError(name=name, expected="no hook", given=f"{len(value)} hooks")
        elif type(value) is not type(self.value) or value != self.value:
            raise ArtifactInputError(name=name, expected=repr(self.value), given=repr(value))

    @property
    def is_hooks(self) -> bool:
        """Whether it is a dict of hooks, which has to stay empty."""
        return self.source.endswith(_HOOKS)


def constants_of(
    sources: Iterable[str], given: Mapping[str, Any], namespace: Mapping[str, Any]
) -> list[Constant]:
    """Those of Dynamo's guards on constants that a direct call can compare: what lies in the owner, or in an object
    that it holds, and in the globals of the function. Arguments are the caller's own to know."""
    found = []
    for source in dict.fromkeys(sources):
        place = _place(source, given, namespace)
        if place is None:
            continue
        value = place[0][place[1]]
        if source.endswith(_HOOKS) and not value:
            found.append(Constant(source, None))
        elif type(value) in _PLAIN:
            found.append(Constant(source, value))
    return found


def compared(
    constants: Iterable[Constant], given: Mapping[str, Any], namespace: Mapping[str, Any]
) -> list[tuple[Any, Any, Any]]:
    """(dict, key, value) of each constant but hooks, which ``hooks_registered`` tells of."""
    places = [(_place(one.source, given, namespace), one) for one in constants if not one.is_hooks]
    return [(*place, one.value) for place, one in places if place is not None]


def hooks_registered() -> int:
    """How many hooks were ever registered in this process."""
    return RemovableHandle.next_id


def _place(source: str, given: Mapping[str, Any], namespace: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The dict that an expression's value lies in, and its key there; None where it lies in none."""
    if source.startswith("G['") and source.endswith("']"):
        name = source[3:-2]
        return (namespace, name) if name in namespace else None
    if root(source) != "self":
        return None
    holder, _, last = source.rpartition(".")
    if not last.isidentifier():
        return None
    try:
        container = evaluate(holder, given)
    except (KeyError, AttributeError, IndexError, TypeError):
        return None
    own = container.__dict__ if isinstance(container, nn.Module) or hasattr(container, "__dict__") else {}
    return (own, last) if last in own else None


def receiver_of(function: Any) -> str:
    """What a method, or a module's forward, calls its receiver."""
    method = function.forward if isinstance(function, nn.Module) else function
    plain = getattr(method, "__func__", None)
    return next(iter(inspect.signature(plain).parameters), "self") if plain is not None else "self"
