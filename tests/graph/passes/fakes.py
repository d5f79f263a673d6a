"""Whether the fakes of a graph share memory as the results of its calls do."""

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from dlinfer.graph.ir.dialect import brings_symbol, is_pure, memory_read, schema_name, storages
from dlinfer.graph.passes.rewriter import Rewriter
from dlinfer.graph.torch_private.fake_mode import storage_id

_COPIES = ("aten::contiguous", "aten::reshape")
"""Ops that copied as captured, and need not where a fusion rule has changed their argument's strides."""


def stale_fakes(graph_module: fx.GraphModule) -> list[str]:
    """The nodes whose fake is no view of the argument that the op returns a view of, or a view of something else.

    Each pure op runs again on the fakes of its arguments.
    """
    rewriter, stale = Rewriter(graph_module), []
    known: set[int] = set()
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and is_pure(node) and not brings_symbol(node):
            computed = rewriter.fake_call(node.target, *node.args, **node.kwargs)
            read = memory_read(node)
            shown = _viewed(node.meta["val"], read | known)
            copies = schema_name(node) in _COPIES and shown == [None]
            if not copies and _viewed(computed, read) != shown:
                stale.append(node.format_node())
        known |= storages(node)
    return stale


def _viewed(result: object, memory: set[int] | frozenset[int]) -> list[int | None]:
    """For each tensor of a result, the memory that it is a view of, if that is among some memory."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    ids = [storage_id(tensor) if tensor.layout == torch.strided else 0 for tensor in tensors]
    return [identity if identity in memory else None for identity in ids]
