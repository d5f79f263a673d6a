"""The graphs that torchair writes, as text: op types, inputs, attributes, dtypes, sizes."""

from collections.abc import Sequence

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from tests.vendor.ascend.graph import compiling, models


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    compiling.texts()


def text(model: nn.Module, inputs: list[Tensor], dynamic: Sequence[int] = range(6)) -> str:
    """The one graph of a model, of which the names of its inputs are left out."""
    with torch.no_grad():
        compiling.compiled(model, dynamic, inputs)(*inputs)
    (found,) = compiling.texts()
    return "\n".join(line for line in found.splitlines() if " = Data(" not in line)


def test_a_decoder_with_any_batch():
    assert_expected_inline(
        text(models.Decoder(1).half(), models.inputs(1, [5, 9, 130])),
        """\
%17 = ZerosLike(x=%0) -> y: FLOAT16[n0, 256]
%18 = AddRmsNorm(x1=%0, x2=%17, gamma=%1, epsilon=1e-05) -> y: FLOAT16[n0, 256], rstd: FLOAT[n0, 1], x: FLOAT16[n0,
    256]
%19 = Transpose(x=%2, perm=[1, 0]:INT64) -> y: FLOAT16[256, 512]
%20 = MatMulV2(x1=%18, x2=%19, bias=%3, offset_x=0, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 512]
%21 = Reshape(x=%20, shape=[-1, 8, 64]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 8, 64]
%22 = SplitV(x=%21, size_splits=[4, 2, 2]:INT64, split_dim=1:INT32, num_split=3) -> y0: FLOAT16[n0, 4, 64], y1:
    FLOAT16[n0, 2, 64], y2: FLOAT16[n0, 2, 64]
%23 = Reshape(x=%4, shape=[-1, 1, 64]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 1, 64]
%24 = Reshape(x=%5, shape=[-1, 1, 64]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 1, 64]
%25 = TensorMove(x=%22) -> y
%26 = TensorMove(x=%22:1) -> y
%27 = ApplyRotaryPosEmb(query=%25, key=%26, cos=%23, sin=%24, layout=4) -> query: FLOAT16[n0, 4, 64], key:
    FLOAT16[n0, 2, 64]
%28 = ScatterPaKvCache(key=%27:1, key_cache=%6, slot_mapping=%8, value=%22:2, value_cache=%7) -> key_cache:
    FLOAT16[9, 128, 128], value_cache: FLOAT16[9, 128, 128]
%29 = Cast(x=1:INT64, dst_type=9) -> y
%30 = Less(x1=%10, x2=%29) -> y: BOOL[n0]
%31 = Unsqueeze(x=%30, axes=[-1]) -> y: BOOL[n0, 1]
%32 = MaskedFill(x=%9, mask=%31, value=0:INT32) -> y: INT32[n0, 2]
%33 = Unsqueeze(x=%27, axes=[1]) -> y: FLOAT16[n0, 1, 4, 64]
%34 = ClipByValueV2(x=%10, clip_value_min=1:INT64, clip_value_max=9223372036854775807:INT64) -> y: INT64[n0]
%35 = Reshape(x=%28, shape=[9, 128, 128]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[9, 128, 128]
%36 = Reshape(x=%28:1, shape=[9, 128, 128]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[9, 128, 128]
%37 = FusedInferAttentionScore(query=%33, key0=%35, value0=%36, actual_seq_lengths_kv=%34, block_table=%32,
    antiquant_mode=0, block_size=128, inner_precise=0, input_layout='BSND', key_antiquant_mode=0,
    next_tokens=2147483647, num_heads=4, num_key_value_heads=2, out_dtype=0, pre_tokens=2147483647, pse_type=0,
    query_quant_mode=0, scale=0.125, softmax_lse_flag=False, sparse_mode=0, value_antiquant_mode=0) ->
    attention_out: FLOAT16[n0, 1, 4, 64], softmax_lse: FLOAT[0]
%38 = Squeeze(x=%37, axis=[1]) -> y: FLOAT16[n0, 4, 64]
%39 = Reshape(x=%30, shape=[-1, 1, 1]:INT64, axis=0, num_axes=-1) -> y: BOOL[n0, 1, 1]
%40 = MaskedFill(x=%38, mask=%39, value=0.0:FLOAT16) -> y: FLOAT16[n0, 4, 64]
%41 = Reshape(x=%40, shape=[-1, 256]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 256]
%42 = Transpose(x=%11, perm=[1, 0]:INT64) -> y: FLOAT16[256, 256]
%43 = MatMul(x1=%41, x2=%42, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 256]
%44 = AddRmsNorm(x1=%43, x2=%18:2, gamma=%12, epsilon=1e-05) -> y: FLOAT16[n0, 256], rstd: FLOAT[n0, 1], x:
    FLOAT16[n0, 256]
%45 = Transpose(x=%13, perm=[1, 0]:INT64) -> y: FLOAT16[256, 512]
%46 = MatMul(x1=%44, x2=%45, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 512]
%47 = SwiGlu(x=%46, dim=-1) -> y: FLOAT16[n0, 256]
%48 = Transpose(x=%14, perm=[1, 0]:INT64) -> y: FLOAT16[256, 256]
%49 = MatMul(x1=%47, x2=%48, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 256]
%50 = AddRmsNorm(x1=%49, x2=%44:2, gamma=%15, epsilon=1e-05) -> y: FLOAT16[n0, 256], rstd: FLOAT[n0, 1], x:
    FLOAT16[n0, 256]
%51 = Transpose(x=%16, perm=[1, 0]:INT64) -> y: FLOAT16[256, 320]
%52 = MatMul(x1=%50, x2=%51, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 320]
%53 = NetOutput(input0=%52)""",
    )


def test_experts():
    model = models.Experts(torch.Generator().manual_seed(0)).bfloat16()
    assert_expected_inline(
        text(model, [torch.randn(5, models.HIDDEN).bfloat16()], [0]),
        """\
%4 = Transpose(x=%1, perm=[1, 0]:INT64) -> y: BF16[256, 8]
%5 = MatMul(x1=%0, x2=%4, transpose_x1=False, transpose_x2=False) -> y: BF16[n0, 8]
%6 = Cast(x=%5, dst_type=0) -> y: FLOAT[n0, 8]
%7 = MoeGatingTopKSoftmax(x=%6, k=2) -> y: FLOAT[n0, 2], expert_idx: INT32[n0, 2], row_idx: INT32[n0, 2]
%8 = Cast(x=%7:1, dst_type=9) -> y: INT64[n0, 2]
%9 = Cast(x=%8, dst_type=3) -> y: INT32[n0, 2]
%10 = MoeInitRoutingV3(x=%0, expert_idx=%9, active_expert_range=[0, 8], active_num=-1, drop_pad_mode=0,
    expert_capacity=-1, expert_num=8, expert_tokens_num_flag=True, expert_tokens_num_type=1, quant_mode=-1,
    row_idx_type=0) -> expanded_x: BF16[2*n0, 256], expanded_row_idx: INT32[2*n0], expert_tokens_count_or_cumsum:
    INT64[8], expanded_scale: FLOAT[2*n0]
%11 = Transpose(x=%2, perm=[0, 2, 1]:INT64) -> y: BF16[8, 256, 512]
%12 = Cast(x=0.0:FLOAT, dst_type=0) -> y
%13 = Fill(dims=[0]:INT64, value=%12) -> y
%14 = Cast(x=0.0:FLOAT, dst_type=10) -> y
%15 = Fill(dims=[0]:INT64, value=%14) -> y
%16 = Cast(x=0.0:FLOAT, dst_type=0) -> y
%17 = Fill(dims=[0]:INT64, value=%16) -> y
%18 = Cast(x=0.0:FLOAT, dst_type=1) -> y
%19 = Fill(dims=[0]:INT64, value=%18) -> y
%20 = Cast(x=0.0:FLOAT, dst_type=1) -> y
%21 = Fill(dims=[0]:INT64, value=%20) -> y
%22 = GroupedMatmul(x0=%10, weight0=%11, bias0=%13, scale0=%15, offset0=%17, antiquant_scale0=%19,
    antiquant_offset0=%21, group_list=%10:2, act_type=0, dtype=-1, group_list_type=1, group_type=0, split_item=2,
    transpose_weight=False, transpose_x=False, tuning_config=[0]) -> y0: BF16[2*n0, 512]
%23 = SwiGlu(x=%22, dim=-1) -> y: BF16[2*n0, 256]
%24 = Transpose(x=%3, perm=[0, 2, 1]:INT64) -> y: BF16[8, 256, 256]
%25 = Cast(x=0.0:FLOAT, dst_type=0) -> y
%26 = Fill(dims=[0]:INT64, value=%25) -> y
%27 = Cast(x=0.0:FLOAT, dst_type=10) -> y
%28 = Fill(dims=[0]:INT64, value=%27) -> y
%29 = Cast(x=0.0:FLOAT, dst_type=0) -> y
%30 = Fill(dims=[0]:INT64, value=%29) -> y
%31 = Cast(x=0.0:FLOAT, dst_type=1) -> y
%32 = Fill(dims=[0]:INT64, value=%31) -> y
%33 = Cast(x=0.0:FLOAT, dst_type=1) -> y
%34 = Fill(dims=[0]:INT64, value=%33) -> y
%35 = GroupedMatmul(x0=%23, weight0=%24, bias0=%26, scale0=%28, offset0=%30, antiquant_scale0=%32,
    antiquant_offset0=%34, group_list=%10:2, act_type=0, dtype=-1, group_list_type=1, group_type=0, split_item=2,
    transpose_weight=False, transpose_x=False, tuning_config=[0]) -> y0: BF16[2*n0, 256]
%36 = ReduceSum(x=%7, axes=[-1]:INT64, keep_dims=True) -> y: FLOAT[n0, 1]
%37 = RealDiv(x1=%7, x2=%36) -> y: FLOAT[n0, 2]
%38 = GatherV2(x=%35, indices=%10:1, axis=0:INT64, batch_dims=0, is_preprocessed=False,
    negative_index_support=False) -> y: BF16[2*n0, 256]
%39 = Reshape(x=%38, shape=[-1, 2, 256]:INT64, axis=0, num_axes=-1) -> y: BF16[n0, 2, 256]
%40 = Cast(x=%39, dst_type=0) -> y: FLOAT[n0, 2, 256]
%41 = Unsqueeze(x=%37, axes=[-1]) -> y: FLOAT[n0, 2, 1]
%42 = Mul(x1=%40, x2=%41) -> y
%43 = Cast(x=%42, dst_type=0) -> y: FLOAT[n0, 2, 256]
%44 = ReduceSum(x=%43, axes=[1]:INT64, keep_dims=False) -> y: FLOAT[n0, 256]
%45 = Cast(x=%44, dst_type=27) -> y: BF16[n0, 256]
%46 = NetOutput(input0=%45)""",
    )


def test_a_prompt_over_pages():
    model = models.Prompt(paged=True).half()
    assert_expected_inline(
        text(model, models.prompt(5, 100, torch.float16), range(4)),
        """\
%12 = Transpose(x=%1, perm=[1, 0]:INT64) -> y: FLOAT16[256, 512]
%13 = MatMulV2(x1=%0, x2=%12, bias=%2, offset_x=0, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 512]
%14 = Reshape(x=%13, shape=[-1, 8, 64]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 8, 64]
%15 = SplitV(x=%14, size_splits=[4, 2, 2]:INT64, split_dim=1:INT32, num_split=3) -> y0: FLOAT16[n0, 4, 64], y1:
    FLOAT16[n0, 2, 64], y2: FLOAT16[n0, 2, 64]
%16 = Reshape(x=%3, shape=[-1, 1, 64]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 1, 64]
%17 = Reshape(x=%4, shape=[-1, 1, 64]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 1, 64]
%18 = TensorMove(x=%15) -> y
%19 = TensorMove(x=%15:1) -> y
%20 = ApplyRotaryPosEmb(query=%18, key=%19, cos=%16, sin=%17, layout=4) -> query: FLOAT16[n0, 4, 64], key:
    FLOAT16[n0, 2, 64]
%21 = ScatterPaKvCache(key=%20:1, key_cache=%5, slot_mapping=%7, value=%15:2, value_cache=%6) -> key_cache:
    FLOAT16[9, 128, 128], value_cache: FLOAT16[9, 128, 128]
%22 = ZerosLike(x=%20) -> y: FLOAT16[n0, 4, 64]
%23 = Range(start=0:INT32, limit=2048:INT64, delta=1:INT32) -> y
%24 = Cast(x=%23, dst_type=9) -> y: INT64[2048]
%25 = Unsqueeze(x=%24, axes=[-1]) -> y: INT64[2048, 1]
%26 = Greater(x1=%24, x2=%25) -> y: BOOL[2048, 2048]
%27 = Unsqueeze(x=%20, axes=[0]) -> y: FLOAT16[1, n0, 4, 64]
%28 = Reshape(x=%21, shape=[9, 128, 128]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[9, 128, 128]
%29 = Reshape(x=%21:1, shape=[9, 128, 128]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[9, 128, 128]
%30 = FusedInferAttentionScore(query=%27, key0=%28, value0=%29, atten_mask=%26, actual_seq_lengths=%9,
    actual_seq_lengths_kv=%10, block_table=%8, antiquant_mode=0, block_size=128, inner_precise=0,
    input_layout='BSND', key_antiquant_mode=0, next_tokens=2147483647, num_heads=4, num_key_value_heads=2,
    out_dtype=0, pre_tokens=2147483647, pse_type=0, query_quant_mode=0, scale=0.125, softmax_lse_flag=False,
    sparse_mode=3, value_antiquant_mode=0) -> attention_out: FLOAT16[1, n0, 4, 64], softmax_lse: FLOAT[0]
%31 = Squeeze(x=%30, axis=[0]) -> y: FLOAT16[n0, 4, 64]
%32 = Shape(x=%0, dtype=9) -> y
%33 = Gather(x=%32, indices=0:INT64, batch_dims=0, is_preprocessed=False, negative_index_support=False,
    validate_indices=True) -> y
%34 = Range(start=0:INT32, limit=%33, delta=1:INT32) -> y
%35 = Cast(x=%34, dst_type=9) -> y: INT64[n0]
%36 = Less(x1=%35, x2=%9) -> y: BOOL[n0]
%37 = Reshape(x=%36, shape=[-1, 1, 1]:INT64, axis=0, num_axes=-1) -> y: BOOL[n0, 1, 1]
%38 = SelectV2(condition=%37, then=%31, else=%22) -> result: FLOAT16[n0, 4, 64]
%39 = Reshape(x=%38, shape=[-1, 256]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 256]
%40 = Transpose(x=%11, perm=[1, 0]:INT64) -> y: FLOAT16[256, 256]
%41 = MatMul(x1=%39, x2=%40, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 256]
%42 = NetOutput(input0=%41)""",
    )


def test_eight_bits():
    model = models.EightBit().half()
    model.scale = model.scale.float()
    assert_expected_inline(
        text(model, [torch.randn(5, models.HIDDEN).half()], [0]),
        """\
%4 = RmsNorm(x=%0, gamma=%1, epsilon=1e-05) -> y: FLOAT16[n0, 256], rstd: FLOAT[n0, 1]
%5 = DynamicQuant(x=%4) -> y: INT8[n0, 256], scale: FLOAT[n0]
%6 = Equal(x1=%5:1, x2=0.0:FLOAT) -> y: BOOL[n0]
%7 = Unsqueeze(x=%6, axes=[-1]) -> y: BOOL[n0, 1]
%8 = MaskedFill(x=%5, mask=%7, value=0:INT8) -> y: INT8[n0, 256]
%9 = Unsqueeze(x=%5:1, axes=[-1]) -> y: FLOAT[n0, 1]
%10 = Reshape(x=%9, shape=[-1]:INT64, axis=0, num_axes=-1) -> y: FLOAT[n0]
%11 = Transpose(x=%2, perm=[1, 0]:INT64) -> y: INT8[256, 96]
%12 = Reshape(x=%3, shape=[96]:INT64, axis=0, num_axes=-1) -> y: FLOAT[96]
%13 = QuantBatchMatmulV3(x1=%8, x2=%11, scale=%12, pertoken_scale=%10, dtype=1, transpose_x1=False,
    transpose_x2=False) -> y: FLOAT16[n0, 96]
%14 = DynamicQuant(x=%0) -> y: INT8[n0, 256], scale: FLOAT[n0]
%15 = Equal(x1=%14:1, x2=0.0:FLOAT) -> y: BOOL[n0]
%16 = Unsqueeze(x=%15, axes=[-1]) -> y: BOOL[n0, 1]
%17 = MaskedFill(x=%14, mask=%16, value=0:INT8) -> y: INT8[n0, 256]
%18 = ClipByValueV2(x=%14:1, clip_value_min=7.874015883757579e-10:FLOAT, clip_value_max=inf:FLOAT) -> y: FLOAT[n0]
%19 = Unsqueeze(x=%18, axes=[-1]) -> y: FLOAT[n0, 1]
%20 = Reshape(x=%19, shape=[-1]:INT64, axis=0, num_axes=-1) -> y: FLOAT[n0]
%21 = Transpose(x=%2, perm=[1, 0]:INT64) -> y: INT8[256, 96]
%22 = Reshape(x=%3, shape=[96]:INT64, axis=0, num_axes=-1) -> y: FLOAT[96]
%23 = QuantBatchMatmulV3(x1=%17, x2=%21, scale=%22, pertoken_scale=%20, dtype=1, transpose_x1=False,
    transpose_x2=False) -> y: FLOAT16[n0, 96]
%24 = Add(x1=%13, x2=%23) -> y: FLOAT16[n0, 96]
%25 = NetOutput(input0=%24)""",
    )


def test_two_layers_are_one_graph_that_copies_no_cache():
    """Each layer's caches are written where they lie: nothing but the rotation's arguments is moved."""
    found = text(models.Decoder(2).half(), models.inputs(2, [5, 9, 130])).splitlines()
    kinds = [line.split(" = ")[1].split("(")[0] for line in found if line.startswith("%")]
    counted = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    assert_expected_inline(
        "\n".join(f"{kind} {count}" for kind, count in counted.items()),
        """\
AddRmsNorm 5
ApplyRotaryPosEmb 2
Cast 2
ClipByValueV2 2
FusedInferAttentionScore 2
Less 2
MaskedFill 4
MatMul 7
MatMulV2 2
NetOutput 1
Reshape 14
ScatterPaKvCache 2
SplitV 2
Squeeze 2
SwiGlu 2
TensorMove 4
Transpose 9
Unsqueeze 4
ZerosLike 1""",
    )
