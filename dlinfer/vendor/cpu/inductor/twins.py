"""Twins: fake copies of a subgraph's inputs, with fresh size symbols in place of the model's.

Compiled code of a subgraph must not depend on the model's symbols, because equal subgraphs of other layers, graphs and
processes have other symbols. The fresh symbols have the same ranges and example values as the model's. The compiler
makes assumptions about the fresh symbols, which are checked against the model's symbols afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.graph.torch_private import fake_mode, symbol_guards, symbols


@dataclass
class Twins:
    """The twins of some fake tensors and numbers.

    values: the twins, in order.
    mode: their fake mode.
    original: fresh symbol -> the model's symbol.
    environment: the model's shape environment; None if no size is symbolic.
    """

    values: list[Any]
    mode: fake_mode.FakeTensorMode
    original: dict[Any, Any] = field(default_factory=dict)
    environment: Any = None

    def assumptions(self) -> list[str]:
        """Return the guards that the compiler added on the twins' symbols, as expressions."""
        return symbol_guards.guards_of(self.mode)

    def holds(self, assumptions: Sequence[str]) -> bool:
        """Return whether assumptions about the fresh symbols hold for the model's.

        If so, add guards for them to the model.
        """
        return symbol_guards.guard_all(assumptions, self.original, self.environment)


def twins_of(fakes: Sequence[Any]) -> Twins:
    """Return twins of tensors and of symbolic numbers. Plain numbers are their own twins."""
    mode = fake_mode.fresh_mode()
    twins = Twins([], mode)
    fresh: dict[Any, Any] = {}

    def number(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        twins.environment = value.node.shape_env
        for symbol in sorted(value.node.expr.free_symbols, key=str):
            if symbol not in fresh:
                fresh[symbol] = symbols.fresh_symbol(mode, symbol, value.node.shape_env, len(fresh))
                twins.original[fresh[symbol]] = symbol
        return symbols.symbolic_number(mode, value, fresh)

    for value in fakes:
        if isinstance(value, torch.Tensor):
            sizes = [number(size) for size in value.shape]
            strides = [number(stride) for stride in value.stride()]
            with mode:
                twins.values.append(
                    torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
                )
        else:
            twins.values.append(number(value))
    return twins
