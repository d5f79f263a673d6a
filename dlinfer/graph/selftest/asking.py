"""Putting a function of torch to a graph engine, on the way that a user's graph goes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.engine import Engine
from dlinfer.graph.lowering.lower import lower
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.collect import collecting
from dlinfer.graph.report.report import GraphReport
from dlinfer.graph.selftest.answer import NotTakenError
from dlinfer.graph.torch_private.fake_mode import fresh_mode
from dlinfer.graph.torch_private.symbols import fake_of_any_length


def put_to(
    engine: Engine,
    function: Callable[..., Any],
    given: Sequence[Tensor],
    options: Mapping[str, Any],
    written: Collection[int] = (),
) -> list[Tensor]:
    """What an engine computes of a function: its results, then the inputs that it writes. ``given`` is not changed.

    The first size of each tensor is a symbol, as the number of tokens is. options: the engine's own, all of them.
    Raises NotTakenError where the engine refuses the function, or leaves a call with such numbers to torch.
    """
    mode = fresh_mode()
    fakes = [fake_of_any_length(mode, one) for one in given]

    def flat(*inputs: Tensor) -> tuple[Any, ...]:
        return tuple(pytree.tree_leaves(function(*inputs)))

    captured = trace(flat, fakes, mode)
    chosen = CompileOptions(
        engine=engine.name, fallback="error", small_regions="engine", engine_options=options
    )
    inputs = [one.clone() for one in given]
    try:
        with collecting(GraphReport("a known answer", 0, engine.name)):
            compiled = lower(captured, engine, chosen)
        with torch.no_grad():
            results = compiled(*inputs)
    except GraphFallbackError as refused:
        raise NotTakenError(str(refused.fields["reason"])) from refused
    return [*results, *(inputs[index] for index in sorted(written))]
