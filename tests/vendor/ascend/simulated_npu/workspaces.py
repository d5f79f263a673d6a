"""The fused attention with results and working memory that it is given, as a task of a graph needs it.

A workspace is for lengths: one of the largest size is for any that a block table has room for.
"""

from typing import Any

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import attention, rules
from tests.vendor.ascend.simulated_npu.rules import require

_STEP = 16  # keys to a number of working memory; the vendor's own sizes are not documented


def _npu_fused_infer_attention_score_get_max_workspace(
    query: Tensor, key: Tensor, value: Tensor, *, block_table: Tensor | None, block_size: int, **others: Any
) -> Tensor:
    """Its arguments are those of the attention, which may refuse them."""
    attention.npu_fused_infer_attention_score(
        query, key, value, block_table=block_table, block_size=block_size, **others
    )
    require(block_table is not None, "workspaces of pages, as far as simulated")
    assert block_table is not None
    return torch.zeros(query.shape[0] * block_table.shape[1] * (-(-block_size // _STEP)), dtype=query.dtype)


def _npu_fused_infer_attention_score_infer_output(
    query: Tensor,
    value: Tensor,
    *,
    input_layout: str,
    block_table: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Memory for results, which holds nothing yet."""
    rules.unused(**others)
    rules.one_of("input_layout, as far as simulated", input_layout, ["BSND"])
    require(block_table is not None, "results of pages, as far as simulated")
    require(query.shape[2] == num_heads, f"num_heads: {query.shape[2]}, not {num_heads}")
    require(value.shape[2] == num_key_value_heads * query.shape[3], "num_key_value_heads: those of value")
    return torch.full_like(query, torch.nan), torch.full((1,), torch.nan)


def npu_fused_infer_attention_score_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_lengths_kv: list[int] | None,
    workspace: Tensor | None,
    out: list[Tensor],
    **others: Any,
) -> tuple[Tensor, Tensor]:
    found = attention.npu_fused_infer_attention_score(
        query, key, value, actual_seq_lengths_kv=actual_seq_lengths_kv, **others
    )
    if workspace is not None and actual_seq_lengths_kv is not None:
        needed = sum(-(-length // _STEP) for length in actual_seq_lengths_kv)
        require(
            workspace.numel() >= needed, f"workspace: {needed} for these lengths, not {workspace.numel()}"
        )
    require(len(out) == 2, "out: attention and softmax_lse")
    for given, result in zip(out, found, strict=True):
        rules.tensor("out", given, (result.dtype,), result.dim())
        rules.shape("out", given, result.shape)
        given.copy_(result)
    return out[0], out[1]
