"""Latent attention in graphs: numbers, the text of the graph, and what is left to the kernels."""

import pytest
import torch
from expecttest import assert_expected_inline

from dlinfer.errors import GraphFallbackError
from tests.vendor.ascend.graph import compiling, latent_models

PER_SEQUENCE = range(6)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    compiling.texts()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decoding_with_any_batch_by_one_graph(dtype):
    """Block borders (127, 128, 129), one token, padding between sequences; written caches and all."""
    model = latent_models.LatentAttention(2).to(dtype)
    batches = ([5, 129, 1], [128, 0, 127, 256], [1, 2])
    run = compiling.compiled(model, PER_SEQUENCE, latent_models.inputs(2, batches[0], dtype))
    for lengths in batches:
        inputs = latent_models.inputs(2, lengths, dtype)
        compiling.compiled(model, PER_SEQUENCE, inputs)
        wanted, written = compiling.reference(model, inputs)
        with torch.no_grad():
            found = run(*inputs)
        compiling.close(found, wanted, dtype)
        for cache, other in zip(inputs[6:], written[6:], strict=True):
            compiling.close(cache, other, dtype)
    (text,) = compiling.texts()
    assert text.count("ScatterNdUpdate") == 2 and "ScatterElements" not in text
    assert not any("TensorMove" in line and "576" in line for line in text.splitlines())  # caches stay


def test_the_text_of_a_block():
    model, inputs = latent_models.LatentAttention(1).half(), latent_models.inputs(1, [5, 9, 130])
    with torch.no_grad():
        compiling.compiled(model, PER_SEQUENCE, inputs)(*inputs)
    (found,) = compiling.texts()
    assert_expected_inline(
        "\n".join(line for line in found.splitlines() if " = Data(" not in line),
        """\
%1 = Shape(x=%0, dtype=9) -> y
%2 = Gather(x=%1, indices=0:INT64, batch_dims=0, is_preprocessed=False, negative_index_support=False,
    validate_indices=True) -> y
%12 = RmsNorm(x=%0, gamma=%3, epsilon=1e-05) -> y: FLOAT16[n0, 256], rstd: FLOAT[n0, 1]
%13 = Transpose(x=%4, perm=[1, 0]:INT64) -> y: FLOAT16[256, 2880]
%14 = MatMul(x1=%12, x2=%13, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 2880]
%15 = Reshape(x=%14, shape=[-1, 5, 576]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 5, 576]
%16 = SplitV(x=%15, size_splits=[4, 1]:INT64, split_dim=1:INT32, num_split=2) -> y0: FLOAT16[n0, 4, 576], y1:
    FLOAT16[n0, 1, 576]
%17 = SplitV(x=%16, size_splits=[512, 64]:INT64, split_dim=-1:INT32, num_split=2) -> y0: FLOAT16[n0, 4, 512], y1:
    FLOAT16[n0, 4, 64]
%18 = SplitV(x=%16:1, size_splits=[512, 64]:INT64, split_dim=-1:INT32, num_split=2) -> y0: FLOAT16[n0, 1, 512], y1:
    FLOAT16[n0, 1, 64]
%19 = Reshape(x=%5, shape=[-1, 1, 64]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 1, 64]
%20 = Reshape(x=%6, shape=[-1, 1, 64]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 1, 64]
%21 = TensorMove(x=%17:1) -> y
%22 = TensorMove(x=%18:1) -> y
%23 = ApplyRotaryPosEmb(query=%21, key=%22, cos=%19, sin=%20, layout=4) -> query: FLOAT16[n0, 4, 64], key:
    FLOAT16[n0, 1, 64]
%24 = ConcatV2(x0=%17, x1=%23, concat_dim=-1:INT64, N=2) -> y: FLOAT16[n0, 4, 576]
%25 = ConcatV2(x0=%18, x1=%23:1, concat_dim=-1:INT64, N=2) -> y: FLOAT16[n0, 1, 576]
%26 = FloorDiv(x1=%8, x2=128:INT64) -> y: INT64[n0]
%27 = Mul(x1=%26, x2=128:INT64) -> y
%28 = Cast(x=%27, dst_type=9) -> y: INT64[n0]
%29 = Sub(x1=%8, x2=%28) -> y: INT64[n0]
%30 = Pack(x0=%26, x1=%29, N=2, axis=-1) -> y: INT64[n0, 2]
%31 = SplitV(x=%25, size_splits=[512, 64]:INT64, split_dim=-1:INT32, num_split=2) -> y0: FLOAT16[n0, 1, 512], y1:
    FLOAT16[n0, 1, 64]
%32 = ConcatV2(x0=%18, x1=%31:1, concat_dim=-1:INT64, N=2) -> y: FLOAT16[n0, 1, 576]
%33 = ScatterNdUpdate(var=%7, indices=%30, updates=%32, use_locking=False) -> var: FLOAT16[9, 128, 1, 576]
%34 = Cast(x=1:INT64, dst_type=9) -> y
%35 = Less(x1=%10, x2=%34) -> y: BOOL[n0]
%36 = Unsqueeze(x=%35, axes=[-1]) -> y: BOOL[n0, 1]
%37 = MaskedFill(x=%9, mask=%36, value=0:INT32) -> y: INT32[n0, 2]
%38 = ClipByValueV2(x=%10, clip_value_min=1:INT64, clip_value_max=9223372036854775807:INT64) -> y: INT64[n0]
%39 = Range(start=0:INT32, limit=2:INT64, delta=1:INT32) -> y
%40 = Cast(x=%39, dst_type=9) -> y: INT64[2]
%41 = Mul(x1=%40, x2=128:INT64) -> y
%42 = Cast(x=%41, dst_type=9) -> y: INT64[2]
%43 = Unsqueeze(x=%38, axes=[-1]) -> y: INT64[n0, 1]
%44 = GreaterEqual(x1=%42, x2=%43) -> y: BOOL[n0, 2]
%45 = MaskedFill(x=%37, mask=%44, value=0:INT32) -> y: INT32[n0, 2]
%46 = Reshape(x=%45, shape=[-1]:INT64, axis=0, num_axes=-1) -> y: INT32[2*n0]
%47 = GatherV2(x=%33, indices=%46, axis=0:INT64, batch_dims=0, is_preprocessed=False, negative_index_support=False)
    -> y: FLOAT16[2*n0, 128, 1, 576]
%48 = Reshape(x=%47, shape=[-1, 128, 576]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[2*n0, 128, 576]
%49 = SplitV(x=%48, size_splits=[512, 64]:INT64, split_dim=-1:INT32, num_split=2) -> y0: FLOAT16[2*n0, 128, 512],
    y1: FLOAT16[2*n0, 128, 64]
%50 = Unsqueeze(x=%24, axes=[1]) -> y: FLOAT16[n0, 1, 4, 576]
%51 = SplitV(x=%50, size_splits=[512, 64]:INT64, split_dim=-1:INT32, num_split=2) -> y0: FLOAT16[n0, 1, 4, 512], y1:
    FLOAT16[n0, 1, 4, 64]
%52 = Range(start=0:INT32, limit=%2, delta=1:INT32) -> y
%53 = Cast(x=%52, dst_type=9) -> y: INT64[n0]
%54 = Mul(x1=%53, x2=2:INT64) -> y
%55 = Cast(x=%54, dst_type=9) -> y: INT64[n0]
%56 = Unsqueeze(x=%55, axes=[-1]) -> y: INT64[n0, 1]
%57 = Add(x1=%56, x2=%40) -> y: INT64[n0, 2]
%58 = Cast(x=%57, dst_type=3) -> y: INT32[n0, 2]
%59 = Identity(x=%51) -> y: FLOAT16[n0, 1, 4, 512]
%60 = Identity(x=%49) -> y: FLOAT16[2*n0, 128, 512]
%61 = Identity(x=%49) -> y: FLOAT16[2*n0, 128, 512]
%62 = Identity(x=%51:1) -> y: FLOAT16[n0, 1, 4, 64]
%63 = Identity(x=%49:1) -> y: FLOAT16[2*n0, 128, 64]
%64 = FusedInferAttentionScore(query=%59, key0=%60, value0=%61, actual_seq_lengths_kv=%38, block_table=%58,
    query_rope=%62, key_rope=%63, antiquant_mode=0, block_size=128, inner_precise=0, input_layout='BSND',
    key_antiquant_mode=0, next_tokens=2147483647, num_heads=4, num_key_value_heads=1, pre_tokens=2147483647,
    pse_type=0, query_quant_mode=0, scale=0.04166667, softmax_lse_flag=False, sparse_mode=0, value_antiquant_mode=0)
    -> attention_out: FLOAT16[n0, 1, 4, 512], softmax_lse: FLOAT[0]
%65 = Squeeze(x=%64, axis=[1]) -> y: FLOAT16[n0, 4, 512]
%66 = Reshape(x=%35, shape=[-1, 1, 1]:INT64, axis=0, num_axes=-1) -> y: BOOL[n0, 1, 1]
%67 = MaskedFill(x=%65, mask=%66, value=0.0:FLOAT16) -> y: FLOAT16[n0, 4, 512]
%68 = Reshape(x=%67, shape=[-1, 2048]:INT64, axis=0, num_axes=-1) -> y: FLOAT16[n0, 2048]
%69 = Transpose(x=%11, perm=[1, 0]:INT64) -> y: FLOAT16[2048, 256]
%70 = MatMul(x1=%68, x2=%69, transpose_x1=False, transpose_x2=False) -> y: FLOAT16[n0, 256]
%71 = Add(x1=%0, x2=%70) -> y: FLOAT16[n0, 256]
%72 = NetOutput(input0=%71)""",
    )


def test_heads_that_the_documents_do_not_admit_are_left_to_the_kernel(monkeypatch):
    monkeypatch.setattr(latent_models, "HEADS", 3)
    model, inputs = latent_models.LatentAttention(1).half(), latent_models.inputs(1, [5, 9])
    with pytest.raises(GraphFallbackError, match="heads, not 3"), torch.no_grad():
        compiling.compiled(model, (), inputs)(*inputs)


class _Prompt(torch.nn.Module):
    """A latent prompt over its own keys."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q[..., : latent_models.LATENT])
        rest = (latent_models.HEADS, 1, out, 0.1, True, -1, -1, 0.0, None, None)
        torch.ops.dlinfer.prefill_attention(q, k, v, ends, ends, 200, *rest)
        return out * 2


def test_a_prompt_is_left_to_the_kernel():
    """Heads of 576 numbers are more than the documents of the attention in graphs admit."""
    size, latent = latent_models.SIZE, latent_models.LATENT
    q, k = (torch.randn(6, heads, size).half() for heads in (latent_models.HEADS, 1))
    inputs = [q, k, k[..., :latent].clone(), torch.tensor([6])]
    with (
        pytest.raises(GraphFallbackError, match="the kernels run prompts over a latent cache"),
        torch.no_grad(),
    ):
        compiling.compiled(_Prompt(), (), inputs)(*inputs)
