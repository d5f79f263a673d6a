"""Trace a module's forward, and find fused ops in the trace with the fusion passes of graph mode.

The passes match computations, not class names. So the norm of an unknown model is fused as Llama's norm is.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.dialect import STATIC
from dlinfer.graph.lowering.lower import improve
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private.fake_mode import fresh_mode, with_symbols

RANKS = (2, 3, 4)
"""Numbers of input dimensions to trace. 2: [tokens, size]. 3: [batch, tokens, size]. 4: norms of single heads."""

_LEADING = (3, 5, 7)
"""Example sizes of all input dimensions but the last. They are traced as symbols, and the graph must serve any size."""


_NOTHING = "it contains no fused op"


class NotFused(Exception):
    """A module's forward cannot be replaced. The text says why."""


@dataclass(frozen=True)
class Fused:
    """A module's forward as graphs of fused ops.

    graphs: number of input dimensions -> a graph for such inputs. The graph takes the input, then all parameters and
        buffers.
    argument: the name of the input.
    names: the paths of the parameters and buffers.
    dtype: the dtype of the input.
    ops: the names of the dlinfer ops that the graphs call.
    """

    graphs: dict[int, fx.GraphModule]
    argument: str
    names: tuple[str, ...]
    dtype: torch.dtype
    ops: tuple[str, ...]


def fuse(module: nn.Module) -> Fused:
    """Trace a module that takes one tensor, once for each number of dimensions in RANKS.

    Raises NotFused if no graph has a fused op.
    """
    argument = one_argument(module)
    if argument is None:
        raise NotFused("it takes more than one tensor")
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    dtype = refuse_weights(tensors)
    graphs: dict[int, fx.GraphModule] = {}
    reasons: list[str] = []
    for size in _sizes(tensors.values()):
        for rank in RANKS:
            try:
                graphs[rank] = _graph(module, tensors, rank, size, dtype)
            except NotFused as refused:
                reasons.append(str(refused))
        if graphs:
            break
    else:
        raise NotFused(_NOTHING if _NOTHING in reasons else reasons[0])
    names = sorted({name for graph in graphs.values() for name in _ops(graph)})
    return Fused(graphs, argument, tuple(tensors), dtype, tuple(names))


def refuse_weights(tensors: dict[str, Tensor]) -> torch.dtype:
    """Return the dtype of a module's weights. Raises NotFused unless they are plain tensors of one floating dtype."""
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors.values()):
        raise NotFused("its weights are of a subclass of Tensor")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        raise NotFused("its weights do not all have the same floating dtype")
    return dtypes.pop()


def one_argument(module: nn.Module) -> str | None:
    """Return the name of the argument of a module's forward. Return None if the forward takes none or several."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    plain = len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return parameters[0].name if plain else None


def _sizes(tensors: Any) -> Iterator[int]:
    """Yield candidates for the last size of the input. They are the last sizes of the weights."""
    yield from dict.fromkeys(tensor.shape[-1] for tensor in tensors if tensor.dim())


def _graph(
    module: nn.Module, tensors: dict[str, Tensor], rank: int, size: int, dtype: torch.dtype
) -> fx.GraphModule:
    mode = fresh_mode()
    device = next(iter(tensors.values())).device
    example = torch.empty(*_LEADING[: rank - 1], size, dtype=dtype, device=device)
    x = with_symbols(mode, example, range(rank - 1))
    fixed = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in tensors.values()]

    def forward(x: Tensor, *weights: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(tensors, weights, strict=True)), (x,))

    try:
        with _silent():
            captured = trace(forward, (x, *fixed), mode)
    except CaptureError as cause:
        raise NotFused(f"it cannot be traced: {cause.fields['reason']}") from cause
    assert mode.shape_env is not None
    if mode.shape_env.guards:
        raise NotFused(f"it computes something else for other sizes: {mode.shape_env.guards[0].expr}")
    graph_module = captured.graph_module
    result = graph_module.graph.output_node().args[0]
    if not isinstance(result, fx.Node) or not isinstance(result.meta.get("val"), Tensor):
        raise NotFused("it does not return exactly one tensor")
    for node in graph_module.graph.find_nodes(op="placeholder")[1:]:
        node.meta[STATIC] = True
    improve(graph_module, CompileOptions())
    if not _ops(graph_module):
        raise NotFused(_NOTHING)
    graph_module.recompile()
    return graph_module


@contextmanager
def _silent() -> Iterator[None]:
    """In the block, turn off torch's log of errors. Tracing tries sizes that may be wrong, so errors are expected."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _ops(graph_module: fx.GraphModule) -> list[str]:
    targets = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    return [
        target._schema.name.partition("::")[2]
        for target in targets
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "dlinfer"
    ]
