"""A compiled region of a value engine: the vendor's executable, and the checks and copies around each call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dlinfer.graph.engine_kit.eager_region import eager_program, leave_for_a_call
from dlinfer.graph.engine_kit.held_weights import HeldWeights
from dlinfer.graph.engine_kit.input_overlap import InputOverlap
from dlinfer.graph.engine_kit.output_specs import OutputSpecs
from dlinfer.graph.engine_kit.refused import RefusedError, WrongInputError
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.program import Inputs, Outputs, RegionRun

Executable = Callable[..., Sequence[Tensor]]
"""Called with a function's inputs; returns its outputs. An output that is the new content of an input may be that input
itself, written. May raise RefusedError before it writes anything."""


class Lowered(ABC):
    """A function in a vendor's own form, before its weights are known.

    source: that form as text, for reports. placement: how its nodes run, for reports.
    held: indices of the inputs whose tensors ``compile`` builds in.
    outputs: dtypes and sizes of the outputs; ``outputs.empty(inputs)`` allocates those of a call.
    notes: anything else to report, one sentence each; may grow while it runs.

    Making one raises UnknownSizeError where the outputs' sizes do not follow from the inputs.
    """

    placement = "engine"
    source = ""

    def __init__(self, function: Function, held: Sequence[int] = ()) -> None:
        self.function = function
        self.held = tuple(held)
        self.outputs = OutputSpecs(function)
        self.notes: list[str] = []

    @abstractmethod
    def compile(self, weights: tuple[Tensor, ...]) -> Executable:
        """Compile with these weights, one for each of ``held``. Raises RefusedError.

        Called at once where nothing is held, else at the first call, and again when a weight has changed.
        """

    def check(self, inputs: Inputs) -> None:  # noqa: B027 - most vendors need none
        """Raise RefusedError for inputs that the executable computes wrongly, WrongInputError for wrong inputs."""


class Views(Lowered):
    """A function without computation: torch makes the region's outputs as views of its inputs."""

    placement = "view"

    def compile(self, weights: tuple[Tensor, ...]) -> Executable:
        return lambda *inputs: []


class ValueRegion(RegionRun):
    """A compiled region. Threads may call it at once if they may call the executable at once.

    engine, policy: the engine's name and the fallback policy, for calls that torch runs.
    Making one raises RefusedError where nothing is held and the vendor does not compile it.
    """

    def __init__(self, region: Subgraph, lowered: Lowered, engine: str, policy: str) -> None:
        self.lowered = lowered
        self.source = lowered.source
        self._region = region
        self._name = region.name
        self._engine = engine
        self._policy = policy
        self._function = lowered.function
        self._overlap = InputOverlap(lowered.function)
        self._written = tuple(index for index in lowered.function.writes if index is not None)
        self._eager: Callable[..., Outputs] | None = None
        self._held: HeldWeights | None = None
        self._run: Executable
        if lowered.held:
            names = [node.name for node in lowered.function.inputs]
            self._run = self._held = HeldWeights(lowered.held, names, self._compiled, lowered.notes)
        else:
            self._run = lowered.compile(())

    def __call__(self, *inputs: Any) -> Outputs:
        function = self._function
        function.check(inputs)
        try:
            conflict = self._overlap(inputs)
            if conflict is not None:
                return self._left(conflict, inputs)
            self.lowered.check(inputs)
            if self._written:  # a vendor may write there itself, which torch does not see
                increment_version([inputs[index] for index in self._written])
            values = self._run(*inputs)
        except RefusedError as refused:
            return self._left(str(refused), inputs)
        except WrongInputError:
            return self._by_torch(inputs)
        self.lowered.outputs.check(inputs, values, self._engine, self._name)
        for index, value in zip(function.writes, values, strict=True):
            if index is not None and value is not inputs[index]:
                with torch.no_grad():
                    inputs[index].copy_(value)
        return function.finish(inputs, values)

    @property
    def nbytes(self) -> int:
        """Bytes of the built-in weights."""
        return self._held.nbytes if self._held is not None else 0

    def unbind(self) -> None:
        """Free the weights and the executable; the next call recompiles."""
        if self._held is not None:
            self._held.release()

    def _compiled(self, weights: tuple[Tensor, ...]) -> Executable:
        """The executable with these weights; one that refuses every call where the vendor does not compile it."""
        try:
            return self.lowered.compile(weights)
        except RefusedError as refused:
            reason = str(refused)

        def refuse(*inputs: Any) -> Sequence[Tensor]:
            raise RefusedError(reason)

        return refuse

    def _left(self, reason: str, inputs: Inputs) -> Outputs:
        """Let torch run a call, under the policy; note each reason once."""
        leave_for_a_call(self._region, self._engine, reason, self._policy)
        note = f"ran by torch at a call: {reason}"
        if note not in self.lowered.notes:
            self.lowered.notes.append(note)
        return self._by_torch(inputs)

    def _by_torch(self, inputs: Inputs) -> Outputs:
        if self._eager is None:
            self._eager = eager_program(self._region)
        return self._eager(*inputs)
