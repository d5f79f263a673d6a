"""Run a compiled graph without Dynamo's guards, for adaptors that know what can change between two calls.

A bound call reads the graph's inputs with Dynamo's source expressions, such as ``L['x'].mask``, and runs the graph. It
evaluates no guards and never recompiles. It refuses a call if an input does not fit the graph, or if a constant differs
from its value at the capture. Constants inside an argument are not compared.
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
    """A compiled function, which takes the keyword arguments of the original function.

    function: the original function.
    sources: a source expression for each value of the interface. The first ones read the program's inputs. The others
        read numbers that appear only in conditions, and constants.
    hooks: source expressions of modules' hook dicts, which must be empty.
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

        An argument that changes between calls is copied if it is not contiguous. So the result has the strides that
        contiguous arguments give.
        Raises ArtifactInputError if the graph was not compiled for an argument, or for a value inside an argument.
        """
        if self._autocast or is_autocast_enabled():
            self._check_autocast()
        binding = self._binding
        inputs = None if binding is None else binding(kwargs)
        if inputs is None:
            inputs = self._bind(kwargs)
        return self.program(*inputs)[0]

    def unbind(self) -> None:
        """Release the weights and steady arguments of earlier calls.

        The next call makes a new reader, which keeps the weights and steady arguments of that call.
        """
        self._binding = None
        self.program.unbind()

    def check(self, kwargs: Mapping[str, object]) -> None:
        """Raise ArtifactInputError if the graph was not compiled for the arguments ``kwargs``."""
        self._inputs(self._traced.scope(kwargs))

    def _inputs(self, scope: Scope) -> list[object]:
        """Check all values in a call's scope, and return the program's inputs.

        Raises ArtifactInputError if a value does not fit the interface, a module has a hook, or autocast differs.
        """
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
        """Raise ArtifactInputError if the autocast state is not the one of the capture.

        The graph contains the casts that autocast inserted at the capture.
        """
        if (current := autocast()) != self._autocast:
            raise ArtifactInputError(
                name="autocast", expected=self._autocast or "autocast off", given=current or "autocast off"
            )

    def _bind(self, kwargs: Mapping[str, object]) -> list[object]:
        """Make a new reader from this call's weights and steady arguments. Return the program's inputs for the call."""
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
