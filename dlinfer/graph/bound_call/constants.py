"""What a capture took as constants of the function's arguments, its owner and its module: flags, numbers, names, None,
absent hooks.

Dynamo guards them, and a bound call compares them: most in one comparison of two tuples, hooks by torch's count of
all hooks that were ever registered.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.bound_call.inputs import evaluate, root
from dlinfer.graph.interface.ports import shown
from dlinfer.graph.torch_private.dynamo import source_name

_PLAIN = (bool, int, str, type(None))
_HOOKS = ("._forward_hooks", "._forward_pre_hooks")
_GLOBAL = re.compile(r"G\['(\w+)'\]")
_ABSENT = (KeyError, AttributeError, IndexError, TypeError)


@dataclass(frozen=True)
class Constant:
    """An expression over ``L`` or ``G`` and the value that it had; of hooks, None: there were none."""

    source: str
    value: Any

    def check(self, given: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
        """Raises ArtifactInputError where it has another value."""
        name = source_name(self.source)
        try:
            value = _value(self.source, given, namespace)
        except _ABSENT as cause:
            raise ArtifactInputError(name=name, expected=self._expected, given="nothing") from cause
        if self.is_hooks:
            if value:
                raise ArtifactInputError(name=name, expected=self._expected, given=f"{len(value)} hooks")
        elif type(value) is not type(self.value) or value != self.value:
            raise ArtifactInputError(name=name, expected=self._expected, given=shown(value))

    @property
    def is_hooks(self) -> bool:
        """Whether it is a dict of hooks, which has to stay empty."""
        return self.source.endswith(_HOOKS)

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument of the function itself."""
        return is_argument(self.source)

    @property
    def global_name(self) -> str:
        """The name of a global of the function; empty for another constant."""
        found = _GLOBAL.fullmatch(self.source)
        return found[1] if found else ""

    @property
    def _expected(self) -> str:
        return "no hook" if self.is_hooks else repr(self.value)


def constants_of(
    sources: Iterable[str], given: Mapping[str, Any], namespace: Mapping[str, Any]
) -> list[Constant]:
    """Those of Dynamo's guards on constants that a bound call can compare: arguments, whatever the owner holds, and
    the function's globals. The caller answers for what an argument holds."""
    constants: list[Constant] = []
    for source in dict.fromkeys(sources):
        if not is_argument(source) and not source.startswith(("L['self'].", "G[")):
            continue
        try:
            value = _value(source, given, namespace)
        except _ABSENT:
            continue
        if source.endswith(_HOOKS) and not value:
            constants.append(Constant(source, None))
        elif type(value) in _PLAIN:
            constants.append(Constant(source, value))
    return constants


def is_argument(source: str) -> bool:
    """Whether an expression is an argument of the function itself."""
    name = root(source)
    return bool(name) and source == f"L['{name}']" and name != "self"


def hooks_of(function: Any) -> list[str]:
    """Expressions for the hooks of a module that is called itself: Dynamo traces its forward, which they surround."""
    return [f"L['self']{name}" for name in _HOOKS] if isinstance(function, nn.Module) else []


def hooks_registered() -> int:
    """How many hooks were ever registered in this process."""
    return RemovableHandle.next_id


def _value(source: str, given: Mapping[str, Any], namespace: Mapping[str, Any]) -> Any:
    """Raises one of _ABSENT where there is none."""
    found = _GLOBAL.fullmatch(source)
    return namespace[found[1]] if found else evaluate(source, given)


def receiver_of(function: Any) -> str:
    """What a method, or a module's forward, calls its receiver."""
    method = function.forward if isinstance(function, nn.Module) else function
    plain = getattr(method, "__func__", None)
    return next(iter(inspect.signature(plain).parameters), "self") if plain is not None else "self"
