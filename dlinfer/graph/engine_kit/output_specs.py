"""The outputs of a function: the dtype of each, and its sizes, which follow from a call's inputs."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dlinfer.errors import EngineResultError
from dlinfer.graph.engine_kit.output_sizes import reader, sizes_of
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.ir.program import Inputs


class OutputSpecs:
    """The outputs of one function. Raises UnknownSizeError where a size does not follow from the inputs."""

    def __init__(self, function: Function) -> None:
        self._writes = function.writes
        outputs = [fake(node) for node in function.outputs]
        self._kinds = [(value.dtype, value.device) for value in outputs]
        self._sizes = reader(
            sizes_of([value.shape for value in outputs], [fake(node) for node in function.inputs])
        )

    def empty(self, inputs: Inputs, in_place: Collection[int] = ()) -> list[Tensor]:
        """Allocate contiguous memory for the outputs of a call.

        in_place: indices of written inputs; their own memory is the output where it is contiguous.
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
        """Raise EngineResultError where outputs are not of these dtypes and sizes."""
        expected = self._sizes(inputs)
        if len(outputs) != len(expected):
            results = f"{len(outputs)} results"
            raise EngineResultError(
                engine=engine, region=region, index=0, given=results, expected=str(len(expected))
            )
        for index, (value, (dtype, _), sizes) in enumerate(zip(outputs, self._kinds, expected, strict=True)):
            if value.dtype != dtype or value.shape != sizes:
                result, spec = f"{value.dtype} {list(value.shape)}", f"{dtype} {list(sizes)}"
                raise EngineResultError(
                    engine=engine, region=region, index=index, given=result, expected=spec
                )
