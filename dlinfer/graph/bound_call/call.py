"""Compiled calls without Dynamo's guards, for adaptors that know what can change between two calls.

A call evaluates Dynamo's source expressions to read its inputs, and runs the program. So no call recompiles, and no
guards cost time. A call is refused if a constant differs from its value at the capture. Constants inside an argument
are not compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter

import torch
from torch.utils.hooks import RemovableHandle

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.bound_call.binding import Reader, bind
from dlinfer.graph.bound_call.sources import ABSENT, Scope, Traced, evaluate, root
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.ir.device import autocast
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.report.report import GraphReport
from dlinfer.graph.torch_private.dynamo import source_name
from dlinfer.graph.torch_private.thread_state import is_autocast_enabled


@dataclass
class BoundCall:
    """A compiled function.

    sources: an expression for each value of the interface. The program's inputs come first, then the constants and the
        numbers that appear in conditions only.
    hooks: expressions of modules' hook dicts, which must be empty.
    steady: names of arguments that are the same object at each call.
    """

    function: Callable[..., object]
    program: CompiledGraph
    interface: Interface
    sources: Sequence[str]
    hooks: Sequence[str]
    steady: frozenset[str]
    report: GraphReport

    def __post_init__(self) -> None:
        # Replaced as a whole: each thread reads all its inputs through one reader, the old one or the new one.
        self._binding: Reader | None = None
        self._autocast = dict(self.program.requirement.state.autocast)
        self._traced = Traced(self.function)
        parameters = {name: self._traced.parameters.get(name) for name in map(root, self.sources)}
        self._defaults = {  # for arguments that the graph reads and a call may leave out
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter is not None and parameter.default is not Parameter.empty
        }

    def __call__(self, **kwargs: object) -> torch.Tensor:
        """Run the graph and return its result.

        The call copies a changing argument that is not contiguous, so the result's strides are those for contiguous
        arguments. Raises ArtifactInputError if the graph was not compiled for an argument or a value in it.
        """
        if self._autocast or is_autocast_enabled():
            self._check_autocast()
        binding = self._binding
        inputs = None if binding is None else binding(kwargs)
        if inputs is None:
            inputs = self._bind(kwargs)
        return self.program(*inputs)[0]

    def unbind(self) -> None:
        """Release bound weights and steady arguments. The next call reads them again."""
        self._binding = None
        self.program.unbind()

    def check(self, kwargs: Mapping[str, object]) -> None:
        """Raise ArtifactInputError if the graph was not compiled for such arguments."""
        self._inputs(self._traced.scope(kwargs))

    def _inputs(self, scope: Scope) -> list[object]:
        """Return the program's inputs, read from a call's scope. Raises ArtifactInputError if a value does not fit."""
        self._check_autocast()
        leaves: list[object] = []
        names = [source_name(source) for source in self.sources]
        constants = self.interface.constants
        for place, source in enumerate(self.sources):
            try:
                leaves.append(evaluate(source, scope))
            except ABSENT as cause:
                expected = repr(constants[place]) if place in constants else "the captured value"
                raise ArtifactInputError(
                    name=names[place], expected=expected, given=f"nothing ({cause})"
                ) from cause
        inputs, _ = self.interface.bind(self.interface.values_among(leaves, names))
        for source in self.hooks:
            if hooks := evaluate(source, scope):
                raise ArtifactInputError(
                    name=source_name(source), expected="no hook", given=f"{len(hooks)} hooks"
                )
        return inputs[: len(self.program.program.inputs)]

    def _check_autocast(self) -> None:
        """Raise ArtifactInputError if autocast is not as at the capture, whose casts are nodes of the graph."""
        if (current := autocast()) != self._autocast:
            raise ArtifactInputError(
                name="autocast", expected=self._autocast or "autocast off", given=current or "autocast off"
            )

    def _bind(self, kwargs: Mapping[str, object]) -> list[object]:
        """Bind the steady objects of a call, and return the program's inputs for the call."""
        # Read before the hooks are checked: another thread may register a hook meanwhile.
        hooks = RemovableHandle.next_id
        scope = self._traced.scope(kwargs)
        inputs = self._inputs(scope)
        count = len(self.program.program.inputs)
        binding = bind(self.interface, self.sources, count, self.steady, scope, self._defaults, hooks)
        # A property may return another object at each read. Then the reader returns None, and each call binds anew.
        read = binding(kwargs)
        self._binding = binding
        return inputs if read is None else read
