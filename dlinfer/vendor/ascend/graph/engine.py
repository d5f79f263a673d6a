"""The graph engine ``ascend``: which calls of a captured graph it takes, and why it refuses the others."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from dlinfer.graph.engine_kit.options import EngineOptions
from dlinfer.graph.engine_kit.value_engine import ValueEngine
from dlinfer.graph.engine_kit.value_region import Lowered
from dlinfer.graph.functional.functional_ops import FunctionalCall, functional_call
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import (
    arguments,
    describe,
    fake,
    is_size,
    nodes_in,
    overload,
    written_arguments,
)
from dlinfer.ops.core.spec import NAMESPACE
from dlinfer.vendor.ascend.graph import front_end, lowerings
from dlinfer.vendor.ascend.graph.lowered import AscendLowered, first_line


@dataclass(frozen=True)
class AscendOptions(EngineOptions):
    """The engine has no options yet, because only tests on a card can show which of torchair's settings help."""


class AscendEngine(ValueEngine[AscendOptions]):
    """Runs regions as graphs of GE. Raises ImportError without torchair."""

    name = "ascend"
    options_type = AscendOptions
    device_type = "npu"

    def __init__(self) -> None:
        front_end.load()
        self._asked: dict[str, str | None] = {}

    def refuses_op(self, node: fx.Node) -> str | None:
        """Return a reason why no graph can run a call (a lowering's rule, or torchair's error); None if one can."""
        op = overload(node)
        if op is not None and op.namespace == NAMESPACE:
            return lowerings.refusal(op, map_arg(arguments(node), fake))
        if is_size(node):
            return None
        kind = f"{node.target} {map_arg((node.args, node.kwargs), lambda arg: describe(fake(arg)))}"
        if kind not in self._asked:
            self._asked[kind] = self._fault(node)
        return self._asked[kind]

    def lower(self, function: Function, options: AscendOptions, policy: str) -> Lowered:
        """Convert the function to a graph of GE. Raises RefusedError with torchair's message.

        policy: the fallback policy, which has no effect here.
        """
        return AscendLowered(function)

    def _fault(self, node: fx.Node) -> str | None:
        """Return torchair's error for a graph of this node alone; None if torchair converts it.

        A node that writes into arguments is replaced by its functional twin. If it has no twin, return the reason for
        that.
        """
        op, args, kwargs = node.target, node.args, dict(node.kwargs)
        if written_arguments(node):
            twin = functional_call(node)
            if not isinstance(twin, FunctionalCall):
                return twin
            if twin.op is None:
                return None
            op, args, kwargs = twin.op, twin.args, twin.kwargs
        parents = list(dict.fromkeys(nodes_in((args, kwargs))))

        def alone(*values: Any) -> list[Any]:
            environment = dict(zip(parents, values, strict=True))
            own_args, own_kwargs = map_arg((args, kwargs), environment.__getitem__)
            result = op(*own_args, **own_kwargs)  # pyright: ignore[reportCallIssue]
            results = result if isinstance(result, (list, tuple)) else [result]
            return [
                result.clone() if isinstance(result, Tensor) else result for result in results
            ]  # a view alone makes no graph

        try:
            front_end.convert(alone, [fake(parent) for parent in parents])
        except Exception as error:  # noqa: BLE001 - a converter may raise anything
            return f"torchair cannot convert {op}: {first_line(error)}"
        return None
