"""Program: a compiled graph as a list of calls, its steps.

A program is plain data that can be stored. Each step names a function, and the engine finds the function by this name.
A step's arguments are constants or results of earlier steps. To run, the steps become one Python function with a line
for each step. This function drops each value after its last use. When a step raises, the line number identifies the
step.
"""

import itertools
import linecache
import re
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, map_aggregate, map_arg

from dlinfer.errors import DlinferError, GraphRunError, OpArgumentError
from dlinfer.graph.ir.dialect import Bare, attribute, model_line
from dlinfer.graph.ir.effects import layout_to_keep
from dlinfer.graph.ir.layout import LAYOUT
from dlinfer.graph.ir.result_check import CHECK, expected_result, maker_of
from dlinfer.graph.ir.run_error import run_error

_serial = itertools.count()
_OUT_OF_RANGE = re.compile(r"\bindex\b.*\bout of (range|bounds)\b")
_REFUSAL = re.compile(
    r"dlinfer\.ops\.(?P<op>\w+): argument (?P<argument>\w+): expected (?P<expected>.+), given (?P<given>.+)\.$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Value:
    """An input of a program, or the result of an earlier step."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A tensor that belongs to the program."""

    name: str


@dataclass(frozen=True)
class Step:
    """One call of a program.

    results: the name of the call's value; a tuple of names if the call returns a sequence.
    kind: ``kernel``, ``cluster``, ``region``, ``view``, ``size``, ``eager`` or ``check``; for reports.
    callee: the name of the called function, for the engine's ``resolve``.
    args, kwargs: the arguments, with a Value or a Constant in place of each node.
    line: the line of the model that the call comes from.
    """

    results: str | tuple[str, ...]
    kind: str
    callee: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    line: str

    @classmethod
    def of(cls, node: fx.Node, kind: str, callee: str) -> "Step":
        args, kwargs = refer((node.args, dict(node.kwargs)))
        return cls(node.name, kind, callee, args, kwargs, model_line(node))

    @classmethod
    def laid_out(cls, node: fx.Node, kind: str, callee: str) -> "list[Step]":
        """Return the step that calls a kernel, and up to two steps that make the kernel's result agree with its fake.

        One of these steps asserts dtype and sizes, unless the kernel is dlinfer's. The other enforces the order of
        dimensions that ``layout_to_keep`` returns.
        """
        call, order = cls.of(node, kind, callee), layout_to_keep(node)
        steps = [call]
        expected = None if callee.startswith("native ") else expected_result(node)
        if expected is not None:
            checked = (Value(node.name), *refer(expected))
            steps.append(cls((), CHECK, f"{CHECK} {maker_of(node)}", checked, {}, call.line))
        if order is not None:
            layout = None if order == tuple(range(len(order))) else order
            steps.append(cls(node.name, "view", LAYOUT, (Value(node.name), layout), {}, call.line))
        return steps

    @property
    def names(self) -> tuple[str, ...]:
        return (self.results,) if isinstance(self.results, str) else self.results


@dataclass(frozen=True)
class Joined(Step):
    """One call that replaces several steps in a row.

    parts: the replaced steps. If one of them raises, the error's message begins with ``step N: ``. N is the index of
        the part that raised.
    """

    parts: tuple[Step, ...] = ()

    def failing(self, message: str) -> tuple[Step, str]:
        """Return the part that raised, and the message without ``step N: ``.

        If the message names no part, return this step and the whole message.
        """
        prefix = re.match(r"step (\d+): ", message)
        if prefix is None or int(prefix.group(1)) >= len(self.parts):
            return self, message
        return self.parts[int(prefix.group(1))], message[prefix.end() :]


def refusal_in(text: str) -> OpArgumentError | None:
    """Return the OpArgumentError that an exception's text describes, else None.

    Kernels in C++ can raise such an error only as text.
    """
    match = _REFUSAL.search(text)
    if match is None:
        return None
    return OpArgumentError(
        op=match["op"], argument=match["argument"], expected=match["expected"], given=match["given"]
    )


Function = Callable[..., Any]
"""The function that a step calls."""

Inputs = Sequence[Any]
"""The arguments of one call: tensors, and numbers for symbolic sizes."""

Outputs = tuple[Any, ...]
"""The results of one call: tensors and numbers."""

Join = Callable[[Sequence[Step], Iterable[str]], tuple[Sequence[Step], Mapping[str, Function]]]
"""A function that joins steps. It takes the steps, and the names of the values that are read after them.

It returns the new steps, and callee -> function for the joined steps."""


def refer(argument: Any) -> Any:
    """Return an argument with a Value or a Constant in place of each node."""
    return map_arg(argument, _reference)


def _reference(node: fx.Node) -> Any:
    return Constant(str(node.target)) if node.op == "get_attr" else Value(node.name)


def values_in(argument: Any) -> list[str]:
    names: list[str] = []

    def read(leaf: object) -> None:
        if isinstance(leaf, Value):
            names.append(leaf.name)

    map_aggregate(argument, read)
    return names


class RegionRun(ABC):
    """A region that an engine compiled.

    source: the compiled code as text, for reports.
    engine: the engine's name, for errors while the region runs; empty for regions whose steps say what they call.

    A call takes the region's inputs in order, and returns the tuple of the region's outputs. If the region writes an
    input, the call changes the caller's tensor in place.
    """

    source: str = ""
    engine: str = ""

    @abstractmethod
    def __call__(self, *inputs: object) -> Outputs:
        """Run the region once."""

    def unbind(self) -> None:  # noqa: B027 - most runs hold nothing between two calls
        """Release inputs of earlier calls, such as weights. The next call may keep inputs again."""


@dataclass
class Program(RegionRun):
    """A callable that takes a graph's inputs and returns the tuple of the graph's outputs. Threads may share it.

    resolve: returns the function that a step's callee names. It is called when the program is created.
    join: replaces several steps by one call, if the engine can. ``steps`` keeps the original steps, for reports and the
        disk cache.
    """

    name: str
    inputs: Sequence[str]
    steps: Sequence[Step]
    output: Any
    resolve: Callable[[str], Function]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    join: Join | None = None

    def __post_init__(self) -> None:
        self._lines = self.steps
        self._joined: Mapping[str, Function] = {}
        if self.join is not None:
            self._lines, self._joined = self.join(self.steps, values_in(self.output))
        self.filename = f"<dlinfer {self.name} {next(_serial)}>"
        self.source, scope = self._write()
        linecache.cache[self.filename] = (len(self.source), None, self.source.splitlines(True), self.filename)
        weakref.finalize(self, linecache.cache.pop, self.filename, None)
        exec(compile(self.source, self.filename, "exec"), scope)  # a program written as source is the point
        self._run: Callable[..., Outputs] = scope["run"]

    @classmethod
    def of(
        cls,
        owner: fx.GraphModule,
        steps: Sequence[Step],
        resolve: Callable[[str], Function],
        join: Join | None = None,
        name: str = "",
    ) -> "Program":
        """Return the program that runs ``steps``, with the graph's inputs, outputs and constants.

        owner: the graph's module. name: the program's name; by default the module's.
        """
        inputs = [node.name for node in owner.graph.find_nodes(op="placeholder")]
        output = refer(owner.graph.output_node().args[0])
        targets = [str(node.target) for node in owner.graph.find_nodes(op="get_attr")]
        constants = {target: attribute(owner, target) for target in targets}
        return cls(name or type(owner).__name__, inputs, steps, output, resolve, constants, join)

    def __call__(self, *inputs: object) -> Outputs:
        try:
            return self._run(*inputs)
        except (DlinferError, torch.OutOfMemoryError):  # schedulers catch the latter, free memory and go on
            raise
        except Exception as cause:
            error = self._explained(cause)
            if error is None:
                raise
            refusal = refusal_in(str(cause))
            if refusal is None:
                raise error from cause
            error.__cause__ = cause
            raise refusal from error  # the op's own class of error, caused by an error with the model's line

    def counts(self) -> Counter[str]:
        return Counter(step.kind for step in self.steps)

    def _explained(self, cause: Exception) -> GraphRunError | None:
        """Return a GraphRunError that names the failed step and is also of the cause's class.

        Return None if no step raised. If ``run_error`` has no class for the cause, add the explanation to the cause as
        a note, and return None.
        """
        frames = traceback.walk_tb(cause.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == self.filename]
        if not lines or not 2 <= lines[-1] < 2 + len(self._lines):
            return None
        step, said = self._lines[lines[-1] - 2], str(cause)
        if isinstance(step, Joined):
            step, said = step.failing(said)
        # Kernels in C++ raise RuntimeError whatever is wrong; other classes are what eager raises.
        is_index = type(cause) is RuntimeError and _OUT_OF_RANGE.search(said)
        named = run_error(IndexError if is_index else type(cause))
        error = (named or GraphRunError)(
            region=self.name,
            node=", ".join(step.names or values_in(step.args)),
            op=self._callee(step),
            line=step.line or "an unknown line",
            detail=f"{type(cause).__name__}: {said.strip().splitlines()[0] if said else ''}",
        )
        if named is not None:
            return error
        if not getattr(cause, "__notes__", None):  # a nested region has added its note
            cause.add_note(error.explanation)
        return None

    def _callee(self, step: Step | Joined) -> str:
        """Return the name of what a step calls, for errors. A region's name comes with its engine's."""
        region = self.resolve(step.callee) if step.kind == "region" else None
        engine = region.engine if isinstance(region, RegionRun) else ""
        return f"{step.callee} of engine {engine!r}" if engine else step.callee.removeprefix(f"{CHECK} ")

    def _write(self) -> tuple[str, dict[str, Any]]:
        """Return the source of a function ``run`` with a line for each step, and the globals that the source uses."""
        computed = [name for step in self._lines for name in step.names]
        writer = _Writer([*self.inputs, *computed], self.constants)
        last_use = self._last_uses()
        functions: dict[str, str] = {}
        lines = [f"def run({', '.join(writer.names[name] for name in self.inputs)}):"]
        for index, step in enumerate(self._lines):
            function = functions.setdefault(step.callee, f"{step.kind}{len(functions)}")
            if function not in writer.scope:
                writer.scope[function] = self._joined.get(step.callee) or self.resolve(step.callee)
            arguments = [writer.text(arg) for arg in step.args]
            arguments += [f"{key}={writer.text(value)}" for key, value in step.kwargs.items()]
            targets = "".join(f"{writer.names[name]}, " for name in step.names) or "_"
            if isinstance(step.results, str):
                targets = writer.names[step.results]
            line = f"    {targets} = {function}({', '.join(arguments)})"
            if index in last_use:
                line += "; " + " = ".join(writer.names[name] for name in last_use[index]) + " = None"
            lines.append(line)
        lines.append(f"    return {writer.text(self.output)}")
        return "\n".join(lines) + "\n", writer.scope

    def _last_uses(self) -> dict[int, list[str]]:
        """Return step index -> names of the values that this step is the last to use. Program outputs are left out."""
        last: dict[str, int] = {}
        for index, step in enumerate(self._lines):
            for name in (*step.names, *values_in([step.args, dict(step.kwargs)])):
                last[name] = index
        outputs = set(values_in(self.output))
        by_step: dict[int, list[str]] = {}
        for name, index in last.items():
            if name not in outputs:
                by_step.setdefault(index, []).append(name)
        return by_step


class _Writer:
    """Writes arguments as Python code. An object without a literal becomes a name in the program's scope.

    names: value -> its variable in the source. constants: constant -> its variable. scope: variable -> object.
    """

    def __init__(self, values: Iterable[str], constants: Mapping[str, object]) -> None:
        self.names = {name: f"v{index}" for index, name in enumerate(values)}
        self.constants = {name: f"c{index}" for index, name in enumerate(constants)}
        self.scope: dict[str, Any] = {self.constants[name]: value for name, value in constants.items()}
        self._objects: dict[int, str] = {}

    def text(self, value: Any) -> str:
        return repr(map_aggregate(value, self._leaf))

    def _leaf(self, value: object) -> Argument:
        if isinstance(value, Value):
            return Bare(self.names[value.name])
        if isinstance(value, Constant):
            return Bare(self.constants[value.name])
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TypeError(f"the graph uses the symbolic number {value}, but no node computes it")
        name = self._objects.setdefault(id(value), f"k{len(self._objects)}")
        self.scope[name] = value
        return Bare(name)
