"""Routing of tokens to experts, grouped products, and back."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import FLOATS, HALVES, require


def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    rules.unused(finished=finished)
    rules.tensor("x", x, FLOATS, (2, 3))
    require(0 < k <= min(x.shape[-1], 1024), f"k: up to {x.shape[-1]} and 1024, not {k}")
    weights, ids = x.float().softmax(-1).topk(k, dim=-1)
    rows = torch.arange(ids.numel(), dtype=torch.int32).view(k, -1).t().reshape(ids.shape)
    return weights.to(x.dtype), ids.int(), rows


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None,
    offset: Tensor | None,
    active_num: int,
    expert_capacity: int,
    expert_num: int,
    drop_pad_mode: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: list[int],
    row_idx_type: int,
    x_dtype: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rules.unused(offset=offset, drop_pad_mode=drop_pad_mode, x_dtype=x_dtype)
    require(expert_capacity == -1, "expert_capacity is not used")
    rules.tensor("x", x, (*FLOATS, torch.int8), 2)
    rules.tensor("expert_idx", expert_idx, (torch.int32,), 2)
    tokens, chosen = expert_idx.shape
    require(x.shape[0] == tokens, f"x: {tokens} rows")
    require(0 < expert_num <= 10240, f"expert_num: 1..10240, not {expert_num}")
    rules.within("expert_idx", expert_idx, 0, expert_num - 1)
    rules.one_of("expert_tokens_num_type, as far as simulated", expert_tokens_num_type, [1])
    require(expert_tokens_num_flag, "expert_tokens_num_flag: True")
    rules.one_of("quant_mode, as far as simulated", quant_mode, [-1])
    rules.one_of("active_expert_range, as far as simulated", list(active_expert_range), [[0, expert_num]])
    rules.one_of("active_num", active_num, [-1, 0, tokens * chosen])
    rules.one_of("row_idx_type", row_idx_type, [0, 1])
    order = expert_idx.flatten().sort(stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    rows = places if row_idx_type == 0 else order
    counts = torch.bincount(expert_idx.flatten().long(), minlength=expert_num)
    scales = torch.full((tokens * chosen,), torch.nan)
    if scale is not None:
        rules.tensor("scale", scale, (torch.float32,), 1)
        rules.shape("scale", scale, (tokens,))
        scales = scale[order // chosen]
    return x[order // chosen], rows.int(), counts, scales


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    group_list: Tensor | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    output_dtype: int | None,
    **others: object,
) -> list[Tensor]:
    rules.unused(**others)
    require(len(x) == len(weight) == 1, "one tensor of rows and one of weights, as far as simulated")
    rows, weights = x[0], weight[0]
    rules.one_of("split_item", split_item, [2, 3])
    rules.one_of("group_type", group_type, [0])
    rules.one_of("group_list_type", group_list_type, [0, 1])
    rules.tensor("x", rows, (*FLOATS, torch.int8), 2)
    rules.tensor("weight", weights, (*FLOATS, torch.int8), 3, gaps=True)
    require(
        weights.is_contiguous() or weights.transpose(1, 2).is_contiguous(), "weight: contiguous or transposed"
    )
    rules.same_dtype(x=rows, weight=weights)
    groups, inner, columns = weights.shape
    require(rows.shape[1] == inner, f"weight: {rows.shape[1]} rows, not {inner}")
    require(max(inner, columns) < 65536, "inner sizes below 65536")
    require(group_list is not None, "group_list")
    assert group_list is not None
    rules.tensor("group_list", group_list, (torch.int64,), 1)
    rules.shape("group_list", group_list, (groups,))
    require(groups <= 1024, f"up to 1024 groups, not {groups}")
    require(group_list_type == 0 or groups > 1, "group_list of counts: more than one")
    ends = group_list.cumsum(0) if group_list_type == 1 else group_list
    require(bool((ends.diff() >= 0).all()) and int(ends[0]) >= 0, "group_list: not negative, or not falling")
    require(int(ends[-1]) == rows.shape[0], f"group_list: up to {rows.shape[0]}, not {int(ends[-1])}")
    dtype = rules.dtype(output_dtype, rows.dtype)
    if rows.dtype is torch.int8:
        return [_quantised(rows, weights, ends, scale, per_token_scale, dtype)]
    rules.unused(scale=scale, per_token_scale=per_token_scale)
    require(dtype is rows.dtype, f"output_dtype: {rows.dtype}")
    out = rows.new_empty(rows.shape[0], columns)
    for group, (start, end) in enumerate(_spans(ends)):
        out[start:end] = (rows[start:end].float() @ weights[group].float()).to(dtype)
    return [out]


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    numbers = ends.tolist()
    return list(zip([0, *numbers[:-1]], numbers, strict=True))


def _quantised(
    rows: Tensor,
    weights: Tensor,
    ends: Tensor,
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    rules.one_of("output_dtype of quantised products", dtype, HALVES)
    require(scale is not None and per_token_scale is not None, "scale and per_token_scale")
    assert scale is not None and per_token_scale is not None
    (of_columns,), (of_rows,) = scale, per_token_scale
    rules.tensor("scale", of_columns, (torch.bfloat16 if dtype is torch.bfloat16 else torch.float32,), 2)
    rules.shape("scale", of_columns, (weights.shape[0], weights.shape[2]))
    rules.tensor("per_token_scale", of_rows, (torch.float32,), 1)
    rules.shape("per_token_scale", of_rows, rows.shape[:1])
    out = torch.empty(rows.shape[0], weights.shape[2], dtype=dtype)
    for group, (start, end) in enumerate(_spans(ends)):
        products = (rows[start:end].double() @ weights[group].double()).float()
        out[start:end] = (products * of_columns[group].float() * of_rows[start:end, None]).to(dtype)
    return out


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> Tensor:
    rules.unused(padded_mode=padded_mode, restore_shape=restore_shape)
    rules.tensor("permuted_tokens", permuted_tokens, FLOATS, 2, gaps=True)
    rules.tensor("sorted_indices", sorted_indices, (torch.int32,), 1, gaps=True)
    rules.shape("sorted_indices", sorted_indices, permuted_tokens.shape[:1])
    rules.within("sorted_indices", sorted_indices, 0, len(sorted_indices) - 1)
    require(sorted_indices.unique().numel() == len(sorted_indices), "sorted_indices: none twice")
    require(probs is not None, "probs, as far as simulated")
    assert probs is not None
    rules.tensor("probs", probs, (permuted_tokens.dtype,), 2, gaps=True)
    tokens, chosen = probs.shape
    require(tokens * chosen == len(sorted_indices) and chosen <= 512, "probs: [tokens, choices]")
    rows = permuted_tokens[sorted_indices.long()].unflatten(0, (tokens, chosen)).float()
    return (rows * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)
