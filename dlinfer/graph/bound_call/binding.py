"""What a compiled call has bound, as one generated function: it reads the inputs of a call, or says to bind anew.

Weights and steady arguments are read once and then only compared with what was read; the rest is read at each call.
The comparisons see another object in the place of a bound one: an element of a list of caches, a parameter or a module
that was replaced (assignment, ``load_state_dict(assign=True)``), another number in an attribute. Writes into the same
tensors need none. They do not see a tensor that itself becomes another one (``parameter.data = ...`` of another dtype
or layout, which ``Module.to(dtype)`` does, or ``resize_``): after these, ``BoundCall.unbind``.

Python's own comparison of lists and dicts does most of it at the speed of C: a bound container is compared with a copy
of it, where objects that are identical are equal at once. Of two different tensors it asks ``==``, which raises unless
the result has one element. So tensors of one element, the only ones that could be equal without being the same, are
compared by ``is`` besides.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dlinfer.graph.bound_call.constants import Constant
from dlinfer.graph.bound_call.inputs import evaluate, is_steady, root
from dlinfer.graph.interface.interface import Interface, as_taken, mismatches
from dlinfer.graph.interface.ports import Port

Reader = Callable[[Mapping[str, Any]], list[Any] | None]

_STEP = re.compile(r"\.\w+\(\)|\.\w+|\['\w+'\]|\[\d+\]")
_OWN = "L['self']"
_REGISTRIES = ("_modules", "_parameters", "_buffers")


def bind(
    interface: Interface,
    sources: Sequence[str],
    taken: int,
    steady: Collection[str],
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    constants: Sequence[Constant],
    namespace: Mapping[str, Any],
    hooks: int,
) -> Reader:
    """A function from a call's arguments to the list of all inputs; None where what is bound is not what is given.

    sources: where each value of the interface is read; the graph takes the first ``taken``, and conditions read the
    others. given: arguments that fit the interface, to which the steady ones are bound. defaults: of arguments that a
    call may leave out. namespace: the function's globals. hooks: how many hooks were registered when the constants were
    compared.
    A changing tensor that does not lie as compiled loops expect is copied: for small inputs that is no more than a
    step's metadata.
    """
    writer = _Writer(given)
    inputs: list[Any] = [None] * taken
    ports = iter(interface.inputs)
    for index, source in enumerate(sources[:taken]):
        port = None if index in interface.constants else next(ports)
        if port is None or port.held or is_steady(source, steady):
            inputs[index] = evaluate(source, given)
            writer.bound(source, inputs[index], steady)
        else:
            writer.changing(port, source, index)
    for source in sources[taken:]:
        writer.bound(source, evaluate(source, given), steady)
    for constant in constants:
        writer.constant(constant, namespace)
    return writer.function(inputs, defaults, hooks)


class _Writer:
    """Writes the function: checks line by line, with the objects that they name in its scope."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._scope: dict[str, Any] = {"own": given["self"]}
        self._names: dict[int, str] = {}
        self._live: dict[int, Any] = {}
        self._arguments: dict[str, None] = {}
        self._checks: dict[str, None] = {}
        self._reads: list[str] = []
        self._constants: dict[str, Any] = {}
        self._holders: dict[str, Any] = {}

    def name(self, value: Any) -> str:
        """The name of an object in the scope."""
        if id(value) not in self._names:
            self._names[id(value)] = f"c{len(self._names)}"
            self._scope[self._names[id(value)]] = value
        return self._names[id(value)]

    def changing(self, port: Port, source: str, index: int) -> None:
        """Read an input that changes, and check what the graph relies on."""
        self._reads += [
            f"x = {_text(source)}",
            f"if {' or '.join(mismatches(port, 'x', self.name))}: return None",
            f"inputs[{index}] = {as_taken(port, 'x')}",
        ]

    def bound(self, source: str, value: Any, steady: Collection[str]) -> None:
        """Check that an expression still gives what it gave, by the objects on its way."""
        argument = root(source)
        if argument != "self" and argument not in steady:
            # A number that never changes, of an argument that does.
            text = _text(source)
            self._reads.append(f"if type({text}) is not {self.name(type(value))}: return None")
            self._reads.append(f"if {text} != {self.name(value)}: return None")
            return
        place = "own"
        if argument != "self":
            place = self.name(self._given[argument])
            self._arguments[f"L[{argument!r}] is not {place}"] = None
        found = self._given[argument]
        for step in _STEP.findall(source[len(f"L[{argument!r}]") :]):
            container, found = found, _taken(found, step)
            self._step(container, place, step, found)
            place = self.name(found)

    def _step(self, container: Any, place: str, step: str, found: Any) -> None:
        if isinstance(container, nn.Module) and step[1:] in _REGISTRIES:
            return  # torch never replaces these dicts
        if isinstance(container, (torch.Tensor, tuple)):
            return  # its sizes: it is bound itself
        if type(container) in (list, dict) and step.startswith("[") and _is_plain(container):
            self._live[id(container)] = container
            if not isinstance(found, torch.Tensor) or (found.numel() > 1 and _is_torchs(found)):
                return
        own = getattr(container, "__dict__", {})
        if (
            step[1:] in own and own[step[1:]] is found
        ):  # read without the module's own way of finding attributes
            place, step = self.name(own), f"[{step[1:]!r}]"
        self._checks[f"{place}{step} is not {self.name(found)}"] = None

    def constant(self, constant: Constant, namespace: Mapping[str, Any]) -> None:
        """Check that a constant is what it was, where it lies; hooks are checked by their count."""
        source, value = constant.source, constant.value
        if constant.is_hooks:
            return
        if constant.global_name:
            self._constants[f"{self.name(namespace)}[{constant.global_name!r}]"] = value
            return
        if constant.is_argument:
            same = value is None or type(value) is bool
            kind = "" if same else f"type({source}) is not {self.name(type(value))} or "
            self._arguments[f"{kind}{source} {'is not' if same else '!='} {self.name(value)}"] = None
            return
        *way, last = _STEP.findall(source[len(_OWN) :])
        path = _OWN + "".join(way)
        if path not in self._holders:
            self._holders[path] = self._steady_holder(way)
            if self._holders[path] is not None:
                self.bound(path, self._holders[path], ())
        holder = self._holders[path]
        if holder is None:
            self._constants[_text(source)] = value
            return
        own = getattr(holder, "__dict__", {})
        if last[1:] in own:
            holder, last = own, f"[{last[1:]!r}]"
        self._constants[f"{self.name(holder)}{last}"] = value

    def _steady_holder(self, way: Sequence[str]) -> Any:
        """What lies at the end of some steps from the owner; None where a step, as a bound method or a property, gives
        another object whenever it is taken."""
        holder = self._given["self"]
        for step in way:
            container, holder = holder, _taken(holder, step)
            if _taken(container, step) is not holder:
                return None
        return holder

    def function(self, inputs: list[Any], defaults: Mapping[str, Any], hooks: int) -> Reader:
        """The function that does all this and gives these inputs, with those that change in their places."""
        self._scope["bound"] = inputs
        self._scope["handles"] = RemovableHandle
        self._checks[f"handles.next_id != {hooks}"] = None
        if self._constants:
            self._scope["constants"] = tuple(self._constants.values())
            self._checks[f"({''.join(f'{one}, ' for one in self._constants)}) != constants"] = None
        checks = [*self._arguments]
        if self._live:
            self._scope["live"] = tuple(self._live.values())
            self._scope["copies"] = tuple(one.copy() for one in self._live.values())
            checks.append("live != copies")
        lines = [f"if {check}: return None" for check in (*checks, *self._checks)]
        lines += ["inputs = bound.copy()", *self._reads, "return inputs"]
        if defaults:
            self._scope["defaults"] = dict(defaults)
            lines.insert(0, "L = defaults | L")
        body = "".join(f"        {line}\n" for line in lines)
        # What cannot be read or compared is not what was bound; binding anew says what is wrong with it.
        errors = "(LookupError, AttributeError, TypeError, ValueError, RuntimeError)"
        text = f"def read(L):\n    try:\n{body}    except {errors}:\n        return None\n"
        exec(
            compile(text, "<dlinfer inputs>", "exec"), self._scope
        )  # expressions of Dynamo's own, as its guards are
        return self._scope["read"]


def _text(source: str) -> str:
    return "own" + source[len(_OWN) :] if source.startswith(_OWN) else source


def _taken(value: Any, step: str) -> Any:
    """What one step of an expression gives."""
    if step.endswith("()"):
        return getattr(value, step[1:-2])()
    if step.startswith("."):
        return getattr(value, step[1:])
    return value[step[2:-2] if step.startswith("['") else int(step[1:-1])]


def _is_plain(container: Any) -> bool:
    """Whether a list or dict has only what stays where it is; a counter beside a tensor would change at each call."""
    values = container.values() if isinstance(container, dict) else container
    return all(
        value is None or type(value) in (list, dict, tuple) or isinstance(value, (torch.Tensor, nn.Module))
        for value in values
    )


def _is_torchs(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
