"""Generate the reader of a bound call: a function that collects the graph's inputs from a call's arguments.

The first call makes a reader, which keeps the weights and the steady arguments of this call. A steady argument is the
same object at each call, such as the KV caches. In later calls, the reader checks that the kept objects are still in
place, and reads the other inputs from the arguments. If a kept object was replaced, the reader returns None, and a new
reader is made.

The reader notices

- a replaced KV cache in a list;
- a replaced parameter or module, also after ``load_state_dict(assign=True)``;
- a changed number in an attribute.

Writes into kept tensors need no check. The reader does not notice a tensor that changes its own dtype or layout, by
``resize_``, ``parameter.data = ...`` or ``Module.to(dtype)``. Call ``BoundCall.unbind`` after these.

The reader also keeps a copy of each list or dict that holds kept objects, and compares the list or dict with its copy.
This is fast, because Python counts identical elements as equal without calling ``==``. A replaced tensor of several
elements shows as an error: the result of its ``==`` has no truth value. The reader then returns None. For a replaced
tensor of one element there is no error, so the reader also compares tensors of one element with ``is``.
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
"""A function that takes a call's arguments and returns the program's inputs; None if a kept object was replaced."""

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
    """Return a reader for later calls, which keeps the steady objects of this call.

    interface: the graph's inputs and constants. This call has already passed the interface's checks.
    sources: for each value of the interface, the source expression that reads it. The first ``count`` values are inputs
        of the program. The reader only compares the other values.
    steady: names of the steady arguments.
    scope: the arguments and globals of this call.
    defaults: the default values of arguments that a call may leave out.
    hooks: the value that ``RemovableHandle.next_id`` had before this call was checked. torch increases ``next_id`` for
        each new hook, so the reader notices a new hook.
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
    """Writes the Python source of a reader, and the scope of this source.

    The lines of the source are checks and reads. They refer to objects by names, and the scope maps these names to the
    objects.
    reads: the lines that read inputs from a call's arguments.

    A step is one method call, attribute or index in a source expression. In ``L['a'].b[0]``, the steps ``.b`` and
    ``[0]`` follow the argument ``a``.
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
        """Return the name of ``value`` in the scope. Add ``value`` to the scope if it has no name."""
        if id(value) not in self._names:
            self._names[id(value)] = f"c{len(self._names)}"
            self._scope[self._names[id(value)]] = value
        return self._names[id(value)]

    def bound(self, source: str, value: object) -> None:
        """Add checks that ``source`` still evaluates to the object ``value``: one check for each step of ``source``."""
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
        """Add a check that ``source`` still evaluates to something equal to ``value``.

        If the object before the last step is steady, the reader keeps this object, and evaluates only the last step.
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
        """Return code that applies ``step`` to ``container``.

        The code reads an attribute from ``__dict__`` if possible, because ``Module.__getattr__`` is slow.
        """
        own = getattr(container, "__dict__", {})
        if step[1:] in own and own[step[1:]] is _taken(container, step):
            return f"{self.name(own)}[{step[1:]!r}]"
        return f"{self.name(container)}{step}"

    def _steady_holder(self, argument: str, steps: Sequence[str]) -> object:
        """Apply ``steps`` to an argument, and return the resulting object.

        Return None if a step gives another object at each read, as a property may do.
        """
        holder = self._arguments.get(argument)
        for step in steps:
            container, holder = holder, _taken(holder, step)
            if _taken(container, step) is not holder:
                return None
        return holder

    def function(self, inputs: list[object], defaults: Mapping[str, object], hooks: int) -> Reader:
        """Compile the source and return the reader.

        inputs: the program's inputs, with None in place of each input that a call's arguments give. The reader returns
            a copy of this list, completed with the inputs from the arguments.
        defaults, hooks: see ``bind``.
        """
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
    """Apply one step to ``value``, and return the result. The step is a method call, an attribute or an index."""
    if step.endswith("()"):
        return getattr(value, step[1:-2])()
    if step.startswith("."):
        return getattr(value, step[1:])
    return value[step[2:-2] if step.startswith("['") else int(step[1:-1])]


def _is_plain(container: object) -> TypeGuard[list[object] | dict[object, object]]:
    """Return whether ``container`` is a list or dict that holds only tensors, modules, containers and None.

    Any other list or dict may hold values that change at each call, such as a counter.
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
