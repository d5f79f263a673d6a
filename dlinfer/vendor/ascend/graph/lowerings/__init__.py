"""Lowerings of dlinfer's ops to ATen ops and to the torch_npu ops that the eager kernels call.

A lowering takes the op's arguments and returns the op's results. For an op that writes into arguments, the lowering
returns the new contents of these arguments. Lowerings are traced on fake tensors: they see no values, and sizes may be
symbols.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from dlinfer.graph.functional.functional_ops import functional_op
from dlinfer.graph.torch_private.dispatcher import OpOverload
from dlinfer.ops.core.spec import NAMESPACE
from dlinfer.vendor.ascend.graph.lowerings import (
    caches,
    decode,
    eight_bit,
    experts,
    linears,
    norms,
    pointwise,
    prefill,
)
from dlinfer.vendor.ascend.kernels import KERNELS
from dlinfer.vendor.base import rule_of

LOWERINGS: dict[str, Callable[..., Any]] = {
    lowering.__name__: lowering
    for lowering in (
        norms.rms_norm,
        norms.add_rms_norm,
        pointwise.silu_and_mul,
        pointwise.apply_rotary_pos_emb,
        linears.linear,
        caches.fill_kv_cache,
        decode.paged_decode_attention,
        prefill.prefill_attention,
        prefill.paged_prefill_attention,
        experts.moe_gating_topk_softmax,
        experts.fused_moe,
        eight_bit.dynamic_quant,
        eight_bit.rms_norm_w8a8,
        eight_bit.linear_w8a8,
    )
}


@cache
def table() -> dict[Any, Callable[..., Any]]:
    """Map each op to its lowering. In place of an op that writes into arguments, the key is its functional twin."""
    lowerings: dict[Any, Callable[..., Any]] = {}
    for name, lowering in LOWERINGS.items():
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        lowerings[functional_op(op) if op._schema.is_mutable else op] = lowering
    return lowerings


def refusal(op: OpOverload, arguments: Mapping[str, Any]) -> str | None:
    """Return a reason not to lower a call of a dlinfer op; None if it is lowered.

    The reason comes from the rule of the eager kernel or of the lowering. arguments: fake tensors and other values, by
    name.
    """
    name = op._schema.name.partition("::")[2]
    if name not in LOWERINGS:
        return "the engine has no lowering for this op"
    for table in (KERNELS[name], LOWERINGS[name]):
        rule = rule_of(table)
        reason = rule(*arguments.values()) if rule is not None else None
        if reason is not None:
            return reason
    return None
