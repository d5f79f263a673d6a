"""A compiled region of a value engine: the vendor's executable, and the checks and copies around each call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dlinfer.errors import EngineResultError, GraphFallbackError
from dlinfer.graph.engine import compiling
from dlinfer.graph.engine_kit.eager_region import computing, eager_program
from dlinfer.graph.engine_kit.held_weights import HeldWeights
from dlinfer.graph.engine_kit.output_sizes import reader, sizes_of
from dlinfer.graph.engine_kit.refused import RefusedError, WrongInputError
from dlinfer.graph.functional.aliasing import overlapping
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import STATIC, describe, fake, model_line
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.program import Inputs, Outputs, Program, RegionRun
from dlinfer.ops.core.fallback import Fallback, settle

Executable = Callable[..., Sequence[Tensor]]
"""A function from a region's inputs to its outputs.

If an output is the new content of an input, the executable may write into the input and return it. The executable
may raise RefusedError, but only before it writes."""


class OutputSpecs:
    """The dtypes, sizes and devices of the outputs of a functionalized region.

    The constructor raises UnknownSizeError if the inputs do not determine an output's size.
    """

    def __init__(self, function: Function) -> None:
        self._writes = function.writes
        outputs = [fake(node) for node in function.outputs]
        self._kinds = [(value.dtype, value.device) for value in outputs]
        self._sizes = reader(
            sizes_of([value.shape for value in outputs], [fake(node) for node in function.inputs])
        )

    def empty(self, inputs: Inputs, in_place: Collection[int] = ()) -> list[Tensor]:
        """Return a contiguous tensor for each output of a call. The tensor is new, or is an input that the call writes.

        in_place: indices of written inputs whose memory may hold their new contents. If such an input is contiguous, it
            is itself the tensor for its output.
        """
        return [
            inputs[index]
            if index is not None and index in in_place and inputs[index].is_contiguous()
            else torch.empty(sizes, dtype=dtype, device=device)
            for index, sizes, (dtype, device) in zip(
                self._writes, self._sizes(inputs), self._kinds, strict=True
            )
        ]

    def check(self, inputs: Inputs, outputs: Sequence[Tensor], engine: str, region: str) -> None:
        """Raise EngineResultError if the number, a dtype, a size or a device of the outputs is wrong."""
        expected = self._sizes(inputs)
        if len(outputs) != len(expected):
            results = f"{len(outputs)} results"
            raise EngineResultError(
                engine=engine, region=region, index=0, given=results, expected=str(len(expected))
            )
        kinds = zip(outputs, self._kinds, expected, strict=True)
        for index, (value, (dtype, device), sizes) in enumerate(kinds):
            if value.dtype != dtype or value.shape != sizes or not _same(value.device, device):
                result = f"{value.dtype} {list(value.shape)} on {value.device}"
                spec = f"{dtype} {list(sizes)} on {device}"
                raise EngineResultError(
                    engine=engine, region=region, index=index, given=result, expected=spec
                )


def _same(device: torch.device, other: torch.device) -> bool:
    """Return whether two devices are the same. A device without an index is the same as that device with any index."""
    indices: set[int | None] = {device.index, other.index}
    return device.type == other.type and (len(indices) == 1 or None in indices)


class Lowered(ABC):
    """A functionalized region in a vendor's own form, before its weights are known.

    source: the vendor's form as text, for reports.
    placement: how the nodes run, for reports.
    held: indices of the inputs whose tensors ``compile`` builds in.
    outputs: dtypes, sizes and devices of the outputs; ``outputs.empty(inputs)`` allocates the outputs of a call.
    notes: other facts for the report, a sentence each; the list may grow while the region runs.

    The constructor raises UnknownSizeError if the inputs do not determine an output's size.
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
        """Compile with these weights, one for each index in ``held``. Raises RefusedError if the vendor refuses.

        If ``held`` is empty, dlinfer calls this method once, when it compiles the region. Otherwise dlinfer calls it at
        the region's first call, and again when a weight has changed.
        """

    def check(self, inputs: Inputs) -> None:  # noqa: B027 - most vendors need none
        """Raise RefusedError if the executable would compute wrong results from these inputs.

        Raise WrongInputError if torch would raise an error for these inputs.
        """


class Views(Lowered):
    """A region that computes nothing: torch returns views of the region's inputs."""

    placement = "view"

    def compile(self, weights: tuple[Tensor, ...]) -> Executable:
        return lambda *inputs: []


class InputOverlap:
    """A check for inputs whose memory overlaps. Calling it returns a reason not to run the call, or None.

    The check remembers the addresses and sizes of the last call. It compares all inputs with each other only if a
    weight or a written input has moved. If only other inputs have moved, it leaves out the weights. Several threads may
    call it at the same time.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._written = frozenset(index for index in function.writes if index is not None)
        self._steady = function.weights
        self._moving = [
            index
            for index, node in enumerate(function.inputs)
            if index not in self._steady and isinstance(fake(node), Tensor)
        ]
        self._written_places = {place for place, index in enumerate(self._moving) if index in self._written}
        self._apart: tuple[object, object] = (None, None)

    def __call__(self, inputs: Inputs) -> str | None:
        if not self._written:
            return None
        moving = [inputs[index] for index in self._moving]
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in moving]
        steady = [inputs[index].data_ptr() for index in self._steady]
        steady += [places[place] for place in self._written_places]
        known_places, known_steady = self._apart
        if steady != known_steady:
            reason = self._function.conflict(inputs)
        elif places != known_places:
            reason = overlapping(moving, self._written_places)
        else:
            return None
        self._apart = (None, None) if reason is not None else (places, steady)
        return reason


class ValueRegion(RegionRun):
    """A compiled region. Several threads may call it at the same time if the vendor's executable allows that.

    engine, policy: the engine's name and the fallback policy, for calls that torch runs.
    A region without built-in weights compiles in the constructor. The constructor raises RefusedError if the vendor
    then refuses the region.
    """

    def __init__(self, region: Subgraph, lowered: Lowered, engine: str, policy: str) -> None:
        self.lowered = lowered
        self.source = lowered.source
        self._region = region
        self._name = region.name
        self.engine = engine
        self._policy = policy
        self._function = lowered.function
        self._overlap = InputOverlap(lowered.function)
        self._written = tuple(index for index in lowered.function.writes if index is not None)
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
            if self._written:  # torch does not see it if the vendor writes these inputs itself
                increment_version([inputs[index] for index in self._written])
            values = self._run(*inputs)
        except RefusedError as refused:
            return self._left(str(refused), inputs)
        except WrongInputError:
            return self._eager(*inputs)
        self.lowered.outputs.check(inputs, values, self.engine, self._name)
        for index, value in zip(function.writes, values, strict=True):
            if index is not None and value is not inputs[index]:
                with torch.no_grad():
                    inputs[index].copy_(value)
        return function.finish(inputs, values)

    @property
    def nbytes(self) -> int:
        """The size of the built-in weights in bytes."""
        return self._held.nbytes if self._held is not None else 0

    def unbind(self) -> None:
        """Free the weights and the executable; the next call recompiles."""
        if self._held is not None:
            self._held.release()

    def _compiled(self, weights: tuple[Tensor, ...]) -> Executable:
        """Return the executable with these weights. If the vendor refuses, return one that refuses every call."""
        with compiling(self.engine, self._name):
            try:
                return self.lowered.compile(weights)
            except RefusedError as refused:
                reason = str(refused)

        def refuse(*inputs: object) -> Sequence[Tensor]:
            raise RefusedError(reason)

        return refuse

    def _left(self, reason: str, inputs: Inputs) -> Outputs:
        """Run a call with torch, under the fallback policy. The notes list each reason once."""

        def refusal() -> GraphFallbackError:
            nodes = [node for node in self._function.inputs if not node.meta.get(STATIC)]
            first = next(iter(computing(self._region)), None)
            return GraphFallbackError(
                node=name,
                op="a region",
                call=", ".join(describe(fake(node)) for node in nodes),
                line=(model_line(first) if first is not None else "") or "an unknown line",
                engine=engine,
                reason=reason,
            )

        name, engine = self._region.name, self.engine
        warning = (
            f"{name} runs outside graph engine {engine!r} in a call: {reason}. This warning appears once; all such "
            "calls are counted."
        )
        settle(Fallback(name, engine, reason), self._policy, refusal, lambda: warning)
        note = f"torch ran a call instead: {reason}"
        if note not in self.lowered.notes:
            self.lowered.notes.append(note)
        return self._eager(*inputs)

    @cached_property
    def _eager(self) -> Program:
        return eager_program(self._region)
