"""Ops of experts and of 8 bits, by what ``simulated_npu`` says of the op of torch_npu that is the same."""

import torch
from torch import Tensor

from tests.vendor.ascend.graph.interpreter.registry import GraphError, op
from tests.vendor.ascend.graph.interpreter.values import ge_dtype
from tests.vendor.ascend.simulated_npu import experts, pointwise, products, rules


@op("MoeGatingTopKSoftmax")
def moe_gating_top_ksoftmax(
    x: Tensor, finished: Tensor | None = None, *, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    return experts.npu_moe_gating_top_k_softmax(x, finished, k)


@op("MoeInitRoutingV3")
def moe_init_routing_v3(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int],
    row_idx_type: int = 0,
) -> tuple[Tensor, ...]:
    return experts.npu_moe_init_routing_v2(
        x,
        expert_idx,
        scale=scale,
        offset=offset,
        active_num=active_num,
        expert_capacity=expert_capacity,
        expert_num=expert_num,
        drop_pad_mode=drop_pad_mode,
        expert_tokens_num_type=expert_tokens_num_type,
        expert_tokens_num_flag=expert_tokens_num_flag,
        quant_mode=quant_mode,
        active_expert_range=active_expert_range,
        row_idx_type=row_idx_type,
        x_dtype=None,
    )


@op("GroupedMatmul", lists="x weight bias scale offset antiquant_scale antiquant_offset")
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor],
    scale: list[Tensor],
    offset: list[Tensor],
    antiquant_scale: list[Tensor],
    antiquant_offset: list[Tensor],
    group_list: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    *,
    split_item: int = 0,
    dtype: int = 0,
    transpose_weight: bool = False,
    transpose_x: bool = False,
    group_type: int = -1,
    group_list_type: int = 0,
    act_type: int = 0,
    tuning_config: list[int] | None = None,
) -> list[Tensor]:
    """Lists that are not used hold one empty tensor."""
    for name, given in {"bias": bias, "scale": scale, "offset": offset}.items():
        if [one.numel() for one in given] != [0]:
            raise GraphError(f"{name} is not simulated")
    if [one.numel() for one in (*antiquant_scale, *antiquant_offset)] != [
        0,
        0,
    ] or per_token_scale is not None:
        raise GraphError("scales are not simulated")
    rules.one_of("dtype", dtype, [-1])
    rules.one_of("tuning_config", tuning_config, [None, [0]])
    rules.unused(transpose_weight=transpose_weight, transpose_x=transpose_x, act_type=act_type)
    return experts.npu_grouped_matmul(
        x,
        weight,
        scale=None,
        per_token_scale=None,
        group_list=group_list,
        split_item=split_item,
        group_type=group_type,
        group_list_type=group_list_type,
        output_dtype=None,
    )


@op("DynamicQuant")
def dynamic_quant(x: Tensor, *, dst_type: int = 2) -> tuple[Tensor, Tensor]:
    rules.one_of("dst_type", ge_dtype(dst_type), [torch.int8])
    return pointwise.npu_dynamic_quant(
        x, smooth_scales=None, group_index=None, dst_type=None, quant_mode="pertoken", dst_type_max=0.0
    )


@op("QuantBatchMatmulV3")
def quant_batch_matmul_v3(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    *,
    dtype: int,
    transpose_x1: bool = False,
    transpose_x2: bool = False,
) -> Tensor:
    rules.unused(transpose_x1=transpose_x1)
    wanted = {torch.float16: 5, torch.bfloat16: 15}[ge_dtype(dtype)]
    return products.npu_quant_matmul(
        x1,
        x2.t() if transpose_x2 else x2,
        scale,
        offset=offset,
        pertoken_scale=pertoken_scale,
        bias=bias,
        output_dtype=wanted,
    )
