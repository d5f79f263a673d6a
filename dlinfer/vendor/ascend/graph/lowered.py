"""Convert a functionalized region to a graph of GE, and run it."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.engine_kit.value_region import Executable, Lowered
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import fake
from dlinfer.vendor.ascend.graph import calls, front_end
from dlinfer.vendor.ascend.graph.text import text_of


class AscendLowered(Lowered):
    """A region as a graph of GE. If the region writes an input, torchair writes into that input's memory."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self._checks = calls.checks_of(function.graph_module)
        try:
            self._converted = front_end.convert(_writing(function), [fake(node) for node in function.inputs])
        except Exception as error:
            raise RefusedError(f"torchair cannot convert the region: {first_line(error)}") from error
        self.source = text_of(self._converted.model)
        self.placement = f"GE graph of {len(self._converted.model.op)} ops"

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise RefusedError or OpArgumentError for inputs that would make the graph compute wrong results."""
        for check in self._checks:
            check(inputs)

    def compile(self, weights: tuple[Tensor, ...]) -> Executable:
        """Return the executable for the card. The weights are inputs of the graph and are not copied."""
        run, writes = self._converted.run, self.function.writes

        def execute(*inputs: Any) -> Sequence[Tensor]:
            fresh = iter(run(*inputs))
            return [next(fresh) if index is None else inputs[index] for index in writes]

        return execute


def _writing(function: Function) -> Callable[..., Any]:
    """Return a callable that copies the new contents of written inputs into these inputs.

    It undoes the functionalization, because torchair finds out itself which memory to write. It returns only the other
    outputs.
    """

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        values = fx.Interpreter(function.graph_module).run(*inputs)
        for index, value in zip(function.writes, values, strict=True):
            if index is not None:
                inputs[index].copy_(value)
        return tuple(value for index, value in zip(function.writes, values, strict=True) if index is None)

    return run


def first_line(error: Exception) -> str:
    """Return an error's class and the first line of its message, cut to 300 characters."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
