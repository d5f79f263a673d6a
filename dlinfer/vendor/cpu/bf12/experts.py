"""Mixture of experts with weights packed in 12 bits, on CPU (csrc/bf12/moe.cpp)."""

import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.ops.moe.routing import check_ids
from dlinfer.ops.quantised.bf12 import STRIP
from dlinfer.vendor.cpu.bf12.matrices import unpack
from dlinfer.vendor.cpu.compiled import compiled
from dlinfer.vendor.cpu.moe import fused_moe, in_the_ops_words


def fused_moe_bf12(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    num_experts: int,
    intermediate_size: int,
) -> Tensor:
    hidden, routing = hidden_states.shape[1], (topk_weights, topk_ids)
    ids = (topk_ids, num_experts, ops.fused_moe_bf12.rules)
    # The kernel takes experts that begin with a strip, and x in bfloat16. Other calls are rare; they unpack the
    # weights.
    fits = hidden_states.dtype is torch.bfloat16 and hidden % STRIP == 0 and intermediate_size % STRIP == 0
    kernel = compiled("fused_moe_bf12", hidden_states) if fits else None
    if kernel is not None:
        stacks = (gate_up_weights, down_weights)
        with in_the_ops_words(*ids):
            return kernel(hidden_states, *stacks, *routing, renormalize, num_experts, intermediate_size)
    check_ids(*ids)
    gate_up = unpack(gate_up_weights, num_experts * 2 * intermediate_size, hidden)
    down = unpack(down_weights, num_experts * hidden, intermediate_size)
    gate_up, down = (
        stack.to(hidden_states.dtype).unflatten(0, (num_experts, -1)) for stack in (gate_up, down)
    )
    return fused_moe(hidden_states, gate_up, down, *routing, topk_ids.shape[1], renormalize)
