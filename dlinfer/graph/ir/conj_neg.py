"""Tensors with the conj or neg bit, such as ``z.conj()`` and ``z.conj().imag``: their memory holds the opposite sign.

ATen's kernels respect the bits; loops and kernels that read memory do not. So a graph takes such inputs as resolved
copies, without the bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dlinfer.errors import CaptureError
from dlinfer.graph.ir.dialect import fake, storages
from dlinfer.graph.ir.effects import effects_of


def may_be_lazy(dtype: torch.dtype) -> bool:
    return dtype is not torch.bool  # torch sets the neg bit for every other dtype


def is_lazy(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj())


def resolved(value: Any) -> Any:
    """Return a copy of the value without conj and neg bits if it has one of them; else return the value itself."""
    return value.resolve_conj().resolve_neg() if is_lazy(value) else value


def with_resolved(inputs: Sequence[object], indices: Sequence[int]) -> tuple[object, ...]:
    changed = list(inputs)
    for index in indices:
        changed[index] = resolved(changed[index])
    return tuple(changed)


def refuse_shared(graph: fx.Graph, indices: Sequence[int]) -> None:
    """Raise CaptureError if the graph writes any input, or returns an input at ``indices``.

    indices: the inputs with a conj or neg bit. A call passes resolved copies in their place. So a write could miss the
        caller's tensor, and a returned input would not be the caller's tensor.
    """
    placeholders = graph.find_nodes(op="placeholder")
    names = ", ".join(placeholders[index].name for index in indices)
    effects = effects_of(graph)
    given_back = {memory for node in graph.output_node().all_input_nodes for memory in storages(node)}
    if not effects.written.isdisjoint(effects.outside) or any(
        not given_back.isdisjoint(storages(placeholders[index])) for index in indices
    ):
        raise CaptureError(
            reason=f"torch holds {names} lazily conjugated or negated, and the graph writes or returns its inputs: "
            "call resolve_conj() or resolve_neg() first",
            line="the call",
        )


def lazy_inputs(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(index for index, value in enumerate(values) if is_lazy(value))


def refuse_lazy_constants(graph_module: fx.GraphModule) -> None:
    """Raise CaptureError if a constant of the graph has the conj or neg bit."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if is_lazy(fake(node)) or is_lazy(getattr(graph_module, str(node.target), None)):
            reason = f"the constant {node.name} is lazily conjugated or negated: call resolve_conj() or resolve_neg()"
            raise CaptureError(reason=reason, line="the call")
