"""The fused ops, by what ``simulated_npu`` says of the op of torch_npu that is the same.

Names of inputs and attributes, and which attributes have a default, are those of REG_OP in torchair's
auto_generated_ge_raw_ops.py (torch_npu 2.13.0).
"""

import torch
from torch import Tensor

from tests.vendor.ascend.graph.interpreter.registry import GraphError, op
from tests.vendor.ascend.simulated_npu import attention, caches, pointwise, rules
from tests.vendor.ascend.simulated_npu.rules import require

_WIDE = 2147483647


@op("RmsNorm")
def rms_norm(x: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return pointwise.npu_rms_norm(x, gamma, epsilon)


@op("AddRmsNorm")
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, *, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    normalised, rstd, total = (*pointwise.npu_add_rms_norm(x1, x2, gamma, epsilon),)
    return normalised, rstd, total


@op("SwiGlu")
def swi_glu(x: Tensor, *, dim: int = -1) -> Tensor:
    return pointwise.npu_swiglu(x, dim)


@op("ApplyRotaryPosEmb")
def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, layout: int = 1, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """It writes query and key."""
    layouts = {1: "BSND", 4: "TND"}
    if layout not in layouts:
        raise GraphError(f"layout {layout} is not simulated")
    return pointwise.npu_apply_rotary_pos_emb(query, key, cos, sin, layouts[layout], rotary_mode)


@op("RotaryMul")
def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    return pointwise.npu_rotary_mul(x, r1, r2, "half", None)


@op("ScatterPaKvCache")
def scatter_pa_kv_cache(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor,
    value_cache: Tensor,
    *,
    cache_mode: str = "Norm",
    scatter_mode: str = "None",
    strides: list[int] | None = None,
    offsets: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """It writes the caches, and gives them."""
    rules.one_of("scatter_mode", scatter_mode, ["None"])
    rules.one_of("strides", strides, [None, [1, 1]])
    rules.one_of("offsets", offsets, [None, [0, 0]])
    caches.npu_scatter_pa_kv_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        compress_lens=None,
        compress_seq_offsets=None,
        seq_lens=None,
        cache_mode=cache_mode,
    )
    return key_cache, value_cache


@op("ScatterNdUpdate")
def scatter_nd_update(var: Tensor, indices: Tensor, updates: Tensor, *, use_locking: bool = False) -> Tensor:
    """It writes var, and gives it."""
    rules.unused(use_locking=use_locking)
    return caches.npu_scatter_nd_update_(var, indices, updates)


@op("FusedInferAttentionScore", lists="key value")
def fused_infer_attention_score(
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    *,
    num_heads: int,
    scale: float = 1.0,
    pre_tokens: int = _WIDE,
    next_tokens: int = _WIDE,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    query_quant_mode: int = 0,
    pse_type: int = 0,
    out_dtype: int = 0,
) -> tuple[Tensor, Tensor]:
    rules.unused(
        inner_precise=inner_precise,
        antiquant_mode=antiquant_mode,
        softmax_lse_flag=softmax_lse_flag,
        key_antiquant_mode=key_antiquant_mode,
        value_antiquant_mode=value_antiquant_mode,
        query_quant_mode=query_quant_mode,
        pse_type=pse_type,
        out_dtype=out_dtype,
    )
    lengths = {
        name: None if one is None else _numbers(name, one)
        for name, one in (
            ("actual_seq_lengths", actual_seq_lengths),
            ("actual_seq_lengths_kv", actual_seq_lengths_kv),
        )
    }
    (keys,), (values,) = key, value
    if query_rope is not None or key_rope is not None:
        require(actual_seq_lengths is None, "actual_seq_lengths with query_rope is not simulated")
        out, _ = attention.npu_fused_infer_attention_score_v2(
            query,
            keys,
            values,
            query_rope=query_rope,
            key_rope=key_rope,
            atten_mask=atten_mask,
            actual_seq_kvlen=lengths["actual_seq_lengths_kv"],
            block_table=block_table,
            num_query_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            softmax_scale=scale,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            input_layout=input_layout,
            sparse_mode=sparse_mode,
            block_size=block_size,
        )
        return out, torch.zeros(0)
    out, _ = attention.npu_fused_infer_attention_score(
        query,
        keys,
        values,
        atten_mask=atten_mask,
        **lengths,
        block_table=block_table,
        num_heads=num_heads,
        scale=scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        sparse_mode=sparse_mode,
        block_size=block_size,
    )
    return out, torch.zeros(0)


def _numbers(name: str, lengths: Tensor) -> list[int]:
    rules.tensor(name, lengths, (torch.int64,), 1)
    return lengths.tolist()
