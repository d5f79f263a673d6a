"""Generate the function that reads a bound call's inputs, the reader.

The reader has bound the weights and the steady arguments of an earlier call. It checks that these are still the same
objects, and reads all other inputs from the call's arguments. It notices a replaced object, such as a KV cache in a
list, a parameter or a module (assignment, ``load_state_dict(assign=True)``), and a changed number in an attribute.
Writes into bound tensors need no check. The reader does not notice a tensor that changes its own dtype or layout, by
``resize_``, ``parameter.data = ...`` or ``Module.to(dtype)``. Call ``BoundCall.unbind`` after these.

The reader keeps a copy of each bound list or dict, and compares the list or dict with its copy. This is fast, because
Python counts identical elements as equal. For two different tensors Python calls ``==``. If the result has several
elements, it has no truth value, so Python raises an error, and the reader returns None. Tensors of one element raise no
error, so they are also compared with ``is``.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dlinfer.graph.bound_call.sources import Scope, evaluate, is_argument, is_steady, root
from dlinfer.graph.interface.interface import Interface, as_taken, mismatches

Reader = Callable[[Mapping[str, object]], list[object] | None]
"""A function from a call's arguments to the program's inputs; None if a bound object was replaced."""

_STEP = re.compile(r"\.\w+\(\)|\.\w+|\['\w+'\]|\[\d+\]")
_OWN = "L['self']"
_REGISTRIES = ("_modules", "_parameters", "_buffers")


def bind(
    interface: Interface,
    sources: Sequence[str],
    count: int,
    steady: Collection[str],
    scope: Scope,
    defaults: Mapping[str, object],
    hooks: int,
) -> Reader:
    """Bind a call's steady objects, and return the reader of later calls.

    sources: for each value of the interface, the expression that reads it. count: the first ``count`` of these values
    are inputs of the program; the others are only compared.
    scope: the arguments and globals of the call, which fits the interface.
    defaults: the default values of arguments that a call may leave out.
    hooks: the value of ``RemovableHandle.next_id`` before the interface was checked. torch increases it for each new
    hook.
    """
    writer = _Writer(scope, steady)
    ports = iter(interface.inputs)
    inputs: list[object] = [None] * count
    for index, source in enumerate(sources):
        port = None if index in interface.constants else next(ports)
        if port is None or is_steady(source, steady):
            value = evaluate(source, scope)
            (writer.constant if port is None else writer.bound)(source, value)
            if index < count:
                inputs[index] = value
            continue
        writer.reads += [
            f"x = {_text(source)}",
            f"if {' or '.join(mismatches(port, 'x', writer.name))}: return None",
            f"inputs[{index}] = {as_taken(port, 'x')}",
        ]
    return writer.function(inputs, defaults, hooks)


class _Writer:
    """Writes the source of a Reader: a line for each check, and a scope with the objects that the lines name.

    reads: the lines that read inputs from a call's arguments.
    A step is one method call, attribute or index of an expression: ``L['a'].b[0]`` takes the steps ``.b`` and ``[0]``
    from the argument ``a``.
    """

    def __init__(self, scope: Scope, steady: Collection[str]) -> None:
        self.reads: list[str] = []
        self._arguments, self._steady = scope["L"], ("self", *steady)
        owner = self._arguments["self"]
        self._scope: dict[str, Any] = {"own": owner, "G": scope["G"]}
        self._names: dict[int, str] = {id(owner): "own"}
        self._live: dict[int, list[object] | dict[object, object]] = {}
        self._checks: dict[str, None] = {}
        self._constants: dict[str, object] = {}
        self._holders: dict[str, object] = {}

    def name(self, value: object) -> str:
        """Return the object's name in the scope; add the object if it has none."""
        if id(value) not in self._names:
            self._names[id(value)] = f"c{len(self._names)}"
            self._scope[self._names[id(value)]] = value
        return self._names[id(value)]

    def bound(self, source: str, value: object) -> None:
        """Add checks that an expression still evaluates to the same object: a check for each step of the expression."""
        argument = root(source)
        if argument not in self._steady:  # a steady number in an argument that changes
            self._compare(_text(source), value)
            return
        container = self._arguments[argument]
        if argument != "self":
            self._checks[f"L[{argument!r}] is not {self.name(container)}"] = None
        for step in _steps(source):
            result = _taken(container, step)
            self._step(container, step, result)
            container = result

    def constant(self, source: str, value: object) -> None:
        """Add a check that an expression still has an equal value.

        If possible, this binds the object before the last step, so that the reader evaluates the last step only.
        """
        if is_argument(source) or root(source) not in ("", *self._steady):
            self._compare(source, value)
            return
        steps = _steps(source)
        path = source[: len(source) - len(steps[-1])] if steps else source
        if path not in self._holders:
            self._holders[path] = self._steady_holder(root(source), steps[:-1])
            if self._holders[path] is not None:
                self.bound(path, self._holders[path])
        holder = self._holders[path]
        self._constants[_text(source) if holder is None else self._read(holder, steps[-1])] = value

    def _compare(self, text: str, value: object) -> None:
        if value is None or type(value) is bool:
            self._checks[f"{text} is not {value}"] = None
        else:
            self._checks[f"type({text}) is not {self.name(type(value))} or {text} != {self.name(value)}"] = (
                None
            )

    def _step(self, container: object, step: str, result: object) -> None:
        if isinstance(container, nn.Module) and step[1:] in _REGISTRIES:
            return  # torch never replaces these dicts
        if isinstance(container, (torch.Tensor, tuple)):
            return  # the container itself is bound, so its sizes or elements need no check
        if step.startswith("[") and _is_plain(container):
            self._live[id(container)] = container
            if not isinstance(result, torch.Tensor) or (result.numel() > 1 and _is_torchs(result)):
                return
        self._checks[f"{self._read(container, step)} is not {self.name(result)}"] = None

    def _read(self, container: object, step: str) -> str:
        """Return code that takes one step from an object. It reads ``__dict__``: ``Module.__getattr__`` is slow."""
        own = getattr(container, "__dict__", {})
        if step[1:] in own and own[step[1:]] is _taken(container, step):
            return f"{self.name(own)}[{step[1:]!r}]"
        return f"{self.name(container)}{step}"

    def _steady_holder(self, argument: str, steps: Sequence[str]) -> object:
        """Return the object behind an argument's steps; None if a property among them makes a new one at each read."""
        holder = self._arguments.get(argument)
        for step in steps:
            container, holder = holder, _taken(holder, step)
            if _taken(container, step) is not holder:
                return None
        return holder

    def function(self, inputs: list[object], defaults: Mapping[str, object], hooks: int) -> Reader:
        """Compile the reader. It returns a copy of ``inputs``, completed with the inputs that change."""
        self._scope |= {"bound": inputs, "handles": RemovableHandle}
        checks = [*self._checks, f"handles.next_id != {hooks}"]
        if self._constants:
            self._scope["constants"] = tuple(self._constants.values())
            checks.append(f"({''.join(f'{text}, ' for text in self._constants)}) != constants")
        if self._live:
            self._scope["live"] = tuple(self._live.values())
            self._scope["copies"] = tuple(container.copy() for container in self._live.values())
            checks.append("live != copies")
        lines = [f"if {check}: return None" for check in checks]
        lines += ["inputs = bound.copy()", *self.reads, "return inputs"]
        if defaults:
            self._scope["defaults"] = dict(defaults)
            lines.insert(0, "L = defaults | L")
        body = "".join(f"        {line}\n" for line in lines)
        # An object that cannot be read or compared is not the bound one. The next binding reports what is wrong.
        errors = "(LookupError, AttributeError, TypeError, ValueError, RuntimeError)"
        text = f"def read(L):\n    try:\n{body}    except {errors}:\n        return None\n"
        exec(compile(text, "<dlinfer inputs>", "exec"), self._scope)  # Dynamo's guards do so too
        return self._scope["read"]


def _text(source: str) -> str:
    return "own" + source[len(_OWN) :] if source.startswith(_OWN) else source


def _steps(source: str) -> list[str]:
    argument = root(source)
    return _STEP.findall(source[len(f"L[{argument!r}]") :]) if argument else []


def _taken(value: Any, step: str) -> Any:
    """Return the result of one step from ``value``: a method call, an attribute or an index."""
    if step.endswith("()"):
        return getattr(value, step[1:-2])()
    if step.startswith("."):
        return getattr(value, step[1:])
    return value[step[2:-2] if step.startswith("['") else int(step[1:-1])]


def _is_plain(container: object) -> TypeGuard[list[object] | dict[object, object]]:
    """Return whether a value is a list or dict that holds only tensors, modules, containers and None.

    Other lists and dicts hold values that may change at each call, such as a counter.
    """
    if type(container) not in (list, dict):
        return False
    values = cast("Iterable[object]", container.values() if isinstance(container, dict) else container)
    return all(
        value is None or type(value) in (list, dict, tuple) or isinstance(value, (torch.Tensor, nn.Module))
        for value in values
    )


def _is_torchs(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
