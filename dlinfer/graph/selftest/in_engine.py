"""Run a torch function in a graph engine, the way a user's graph runs."""

from collections.abc import Callable, Mapping, Sequence
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
from dlinfer.graph.selftest.case import NotSupportedError
from dlinfer.graph.torch_private.fake_mode import fresh_mode
from dlinfer.graph.torch_private.symbols import fake_of_any_length


def run_in_engine(
    engine: Engine, function: Callable[..., Any], inputs: Sequence[Tensor], options: Mapping[str, Any]
) -> list[Tensor]:
    """The results of a function, computed by a graph engine. ``inputs`` stay as they are.

    The first size of each tensor is a symbol, as the number of tokens is. options: all of the engine's own options.
    Raises NotSupportedError where the engine refuses the function, or leaves the call to torch.
    """
    mode = fresh_mode()
    fakes = [fake_of_any_length(mode, tensor) for tensor in inputs]

    def flat(*inputs: Tensor) -> tuple[Any, ...]:
        return tuple(pytree.tree_leaves(function(*inputs)))

    captured = trace(flat, fakes, mode)
    chosen = CompileOptions(
        engine=engine.name, fallback="error", small_regions="engine", engine_options=options
    )
    try:
        with collecting(GraphReport("self-test", 0, engine.name)):
            compiled = lower(captured, engine, chosen)
        with torch.no_grad():
            return list(compiled(*(tensor.clone() for tensor in inputs)))
    except GraphFallbackError as refused:
        raise NotSupportedError(str(refused.fields["reason"])) from refused
