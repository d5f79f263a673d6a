"""Twins: fakes of a cut-out graph's inputs in a symbolic world of their own.

A group of nodes that is compiled by itself must not be tied to the symbols of the model around it: the same group
in another layer, another graph or another process has other symbols. Its twins have fresh ones with the same ranges
and example values; what the compiler assumes about them is asked of the model's symbols afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.graph.torch_private import fake_mode, guards, symbols


@dataclass
class Twins:
    """values: one for each fake, in order. mode: theirs. original: fresh symbol -> the model's symbol."""

    values: list[Any]
    mode: fake_mode.FakeTensorMode
    original: dict[Any, Any] = field(default_factory=dict)
    environment: Any = None

    def assumptions(self) -> list[str]:
        """What compiling the twins assumed about their symbols, as expressions that are true."""
        return guards.guards_of(self.mode)

    def holds(self, assumptions: Sequence[str]) -> bool:
        """Whether the model's symbols satisfy these, now and by guards from now on."""
        return guards.guard_all(assumptions, self.original, self.environment)


def twins_of(fakes: Sequence[Any]) -> Twins:
    """Twins of tensors and symbolic numbers; plain numbers are their own."""
    mode = fake_mode.fresh_mode()
    made = Twins([], mode)
    fresh: dict[Any, Any] = {}

    def number(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        made.environment = value.node.shape_env
        for symbol in sorted(value.node.expr.free_symbols, key=str):
            if symbol not in fresh:
                fresh[symbol] = symbols.fresh_symbol(mode, symbol, value.node.shape_env, len(fresh))
                made.original[fresh[symbol]] = symbol
        return symbols.symbolic_number(mode, value, fresh)

    for value in fakes:
        if isinstance(value, torch.Tensor):
            sizes = [number(size) for size in value.shape]
            strides = [number(stride) for stride in value.stride()]
            with mode:
                made.values.append(
                    torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
                )
        else:
            made.values.append(number(value))
    return made
