"""Mixture of experts with one matrix for each expert. Only chosen experts run, and no weight is copied.

dlinfer's op ``fused_moe`` has the weights of all experts in one stack. ONNX Runtime would have to copy an expert's
matrix out of the stack at each call. Instead, each matrix is an input of the session: a view of the stack. ONNX
Runtime's own op MoE is not used. It needs the rows of gate and up interleaved, which would take a second copy of all
weights.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments, fake
from dlinfer.graph.onnx.torch_semantics import BEHIND
from dlinfer.graph.onnx.translations.moe import token_weights
from dlinfer.graph.onnx.translations.writing import number, op, shape_of, sizes
from dlinfer.vendor.onnxruntime.translations.logistic import silu_mul

_aten = torch.ops.aten


def split_experts(graph: fx.Graph, weights: Collection[fx.Node]) -> None:
    """Replace ``fused_moe`` in the graph by ``experts`` if its stacks are among ``weights``.

    Each stack of expert weights is split into one matrix for each expert. Changes the graph in place.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.dlinfer.fused_moe.default):
        call = arguments(node)
        stacks = (call["gate_up_weights"], call["down_weights"])
        if not all(stack in weights and fake(stack).is_contiguous() for stack in stacks):
            continue
        if fake(node).dtype not in (torch.float32, torch.float64):
            continue  # 16-bit products are rounded once, after the sum in float32
        with graph.inserting_before(node):
            matrices = [
                [_matrix(graph, stack, index) for index in range(len(fake(stack)))] for stack in stacks
            ]
            args = (call["hidden_states"], *matrices, call["topk_weights"], call["topk_ids"])
            new = graph.call_function(experts, (*args, call["renormalize"]))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _matrix(graph: fx.Graph, stack: fx.Node, index: int) -> fx.Node:
    node = graph.call_function(_aten.select.int, (stack, 0, index))
    node.meta = {"val": fake(stack)[index]}
    return node


def experts(
    x: Any, gate_ups: Sequence[Any], downs: Sequence[Any], topk_weights: Any, topk_ids: Any, renormalize: bool
) -> Any:
    """Write the layer in ONNX: for each expert, gather its tokens, run its MLP on them, and add up the results."""
    weights = token_weights(x, topk_weights, renormalize)
    known = op.Constant(value_ints=list(range(len(gate_ups))))
    behind = op.Where(op.Less(topk_ids, number(0, topk_ids)), number(BEHIND, topk_ids), topk_ids)
    ids = op.Gather(known, behind)  # the id itself; raises for a wrong id
    zero = number(0.0, x)
    total = op.Expand(zero, shape_of(sizes(x)))
    for index, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
        chosen = op.Equal(ids, op.Constant(value_int=index))
        share = op.ReduceSum(op.Where(chosen, weights, zero), [-1], keepdims=0)
        any_of = op.ReduceMax(op.Cast(chosen, to=6), [-1], keepdims=0)
        rows = op.Reshape(op.NonZero(any_of), [-1])
        gate, up = op.Split(op.Gemm(op.Gather(x, rows), gate_up, transB=1), axis=-1, num_outputs=2)
        gate.dtype = x.dtype
        result = op.Gemm(silu_mul(gate, up), down, transB=1)
        scaled = op.Mul(result, op.Unsqueeze(op.Gather(share, rows), [-1]))
        total = op.ScatterND(total, op.Unsqueeze(rows, [-1]), scaled, reduction="add")
    return total
