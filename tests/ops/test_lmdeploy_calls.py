"""Unmodified LMDeploy's own wrappers, ``lmdeploy.pytorch.kernels.dlinfer``, call the ops as they are.

Names, order and keywords of these calls are the interface's contract; each result is compared with the torch op's.
"""

from typing import Any

import pytest
import torch
from lmdeploy.pytorch.backends.awq_modules import LinearW4A16BuildSpec
from lmdeploy.pytorch.backends.dlinfer.awq_modules import AwqLinearW4A16Impl
from lmdeploy.pytorch.kernels import dlinfer as lmdeploy
from lmdeploy.pytorch.kernels.dlinfer import w8a8_kernels as w8a8
from lmdeploy.pytorch.kernels.dlinfer.activation import silu_and_mul
from torch import Tensor

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.quantised.four_bit import LinearW4A16
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.utils.type_annotation import MoECommType, MoeMetadata

BLOCK = 8


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_norms():
    x, residual, weight = torch.randn(1, 5, 16), torch.randn(1, 5, 16), torch.randn(16)
    assert torch.equal(lmdeploy.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))
    out = torch.empty_like(x)
    assert lmdeploy.rms_norm(x, weight, 1e-5, out=out) is out
    normed, total = lmdeploy.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("batched", [False, True], ids=["3-d", "4-d"])
def test_rotation(batched):
    qkv = torch.randn(5, 8, 16)
    q, k = qkv[:, :4], qkv[:, 4:6]
    if batched:
        q, k = q[None], k[None]
    cos, sin = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    want = ops.apply_rotary_pos_emb(q, k, cos[0], sin[0])
    assert torch.equal(
        torch.cat(lmdeploy.apply_rotary_pos_emb(q, k, cos, sin, None, None), -2), torch.cat(want, -2)
    )
    into = torch.empty(q.shape), torch.empty(k.shape)
    lmdeploy.apply_rotary_pos_emb(q, k, cos, sin, *into)
    assert torch.equal(torch.cat(into, -2), torch.cat(want, -2))


def test_linear_and_activation():
    x, weight, bias = torch.randn(1, 5, 16), torch.randn(8, 16), torch.randn(8)
    torch.testing.assert_close(lmdeploy.linear(x, weight, bias, False), x @ weight.t() + bias)
    torch.testing.assert_close(lmdeploy.linear(x, weight), x @ weight.t())
    assert silu_and_mul(x).shape == (1, 5, 8)


@pytest.mark.parametrize("group_size", [32, 64])
def test_a_weight_of_4_bits(group_size):
    packing = AWQ.of_groups(group_size)
    x, bias = torch.randn(1, 5, 64), torch.randn(24)
    qweight, scales, qzeros = packing.quantise(torch.randn(64, 24))
    assert qzeros is not None
    want = x @ packing.dequantise(qweight, scales, qzeros, torch.float32) + bias
    theirs = AwqLinearW4A16Impl(64, 24, 4, group_size)
    spec = LinearW4A16BuildSpec(64, 24, 4, group_size, True, torch.float16)
    torch.testing.assert_close(theirs.forward(x, qweight, scales, qzeros, bias), want)
    for shape in ((1, 5), (5,), (5, 1)):
        got = LinearW4A16(spec).forward(x.view(*shape, 64), qweight, scales, qzeros, bias)
        torch.testing.assert_close(got, want.view(*shape, 24))


# --- attention


class Step:
    """Two sequences in pages; q, k, v are views of one packed projection, as LMDeploy's models make them."""

    def __init__(self, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> None:
        self.q_seqlens = torch.tensor(q_lens, dtype=torch.int32)
        self.kv_seqlens = torch.tensor(kv_lens, dtype=torch.int32)
        self.ends = torch.nn.functional.pad(self.q_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        self.block_offsets = torch.tensor([[3, 1, 4], [2, 5, 0]], dtype=torch.int32)
        self.k_cache, self.v_cache = torch.randn(6, BLOCK, 2, 16), torch.randn(6, BLOCK, 2, 16)
        qkv = torch.randn(sum(q_lens), 8, 16)
        self.q, self.k, self.v = qkv.split((4, 2, 2), dim=1)
        table = self.block_offsets.long()
        self.slots = torch.cat(
            [
                torch.tensor(
                    [int(table[row, at // BLOCK]) * BLOCK + at % BLOCK for at in range(end - count, end)]
                )
                for row, (count, end) in enumerate(zip(q_lens, kv_lens, strict=True))
            ]
        )

    def fill(self) -> None:
        filled = lmdeploy.fill_kv_cache(
            self.k,
            self.v,
            self.k_cache,
            self.v_cache,
            self.slots,
            k_scales_zeros=[],
            v_scales_zeros=[],
            quant_bits=0,
        )
        assert filled[0] is self.k_cache
        assert filled[1] is self.v_cache
        assert torch.equal(self.k_cache.flatten(0, 1)[self.slots], self.k)
        assert torch.equal(self.v_cache.flatten(0, 1)[self.slots], self.v)

    def attend(self, **flags: Any) -> Tensor:
        """As DlinferAttentionImpl calls it: the output is q's own memory."""
        return lmdeploy.paged_attention_fwd(
            self.q,
            self.k,
            self.v,
            self.q[..., :16],
            self.k_cache,
            self.v_cache,
            self.block_offsets,
            q_seqlens=self.q_seqlens,
            kv_seqlens=self.kv_seqlens,
            max_q_seq_len=int(self.q_seqlens.max()),
            max_kv_seq_len=int(self.kv_seqlens.max()),
            block_size=BLOCK,
            num_heads=4,
            num_kv_heads=2,
            v_head_size=16,
            attn_mask=(),
            softmax_scale=0.25,
            cu_seqlens_q=self.ends,
            cu_seqlens_q_cpu=self.ends,
            kv_seqlens_cpu=self.kv_seqlens,
            **flags,
        )

    def want(self) -> Tensor:
        out = torch.empty(self.q.shape)
        lens = (self.ends[1:], self.kv_seqlens)
        pages = (self.k_cache, self.v_cache, self.block_offsets, BLOCK)
        extras = (0.25, True, -1, -1, 0.0, None, None)
        ops.paged_prefill_attention.reference(self.q, *pages, *lens, 9, 99, 4, 2, out, *extras)
        return out


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "flags"),
    [
        ((5, 9), (5, 9), {"is_decoding": False, "is_prefill_no_cache": True}),
        ((5, 9), (5, 9), {"is_decoding": False, "is_prefill_no_cache": False}),
        ((5, 2), (12, 9), {"is_decoding": False, "is_prefill_no_cache": False, "quant_bits": 0}),
        ((1, 1), (12, 9), {"is_decoding": True}),
    ],
    ids=["prefill", "prefill through the cache", "chunked prefill", "decode"],
)
def test_paged_attention(q_lens, kv_lens, flags):
    step = Step(q_lens, kv_lens)
    step.fill()
    want = step.want()
    got = step.attend(**flags)
    assert got.data_ptr() == step.q.data_ptr()
    torch.testing.assert_close(got, want)


def test_flash_attention_of_vision_models():
    q, out = torch.randn(7, 4, 16), torch.empty(7, 4, 16)
    k, v = torch.randn(7, 4, 16), torch.randn(7, 4, 16)
    starts, lens = torch.tensor([0, 3]), torch.tensor([3, 4])
    lmdeploy.flash_attention_fwd(
        q, k, v, out, starts, lens, starts, lens, 4, 4, max_q_seqlen=4, sm_scale=0.25
    )
    torch.testing.assert_close(out, ops.prefill_attention(q, k, v, None, None, lens, lens, 4, 4, 4))


# --- mixture of experts


def test_mixture_of_experts():
    logits, x = torch.randn(5, 8), torch.randn(5, 16)
    gate_up, down = torch.randn(8, 24, 16), torch.randn(8, 16, 12)
    metadata = MoeMetadata(  # the keywords of LMDeploy's backends
        max_tokens_across_dp=0,
        pad_size=0,
        dp_size=1,
        tp_size=2,
        ep_size=1,
        tp_rank=0,
        ep_rank=0,
        tp_group=None,
        ep_group=None,
        moe_comm_type=MoECommType.ALLGATHER,
        x_active_mask=None,
        moe_group_name=None,
    )
    metadata.router_n_groups = -1
    metadata.expert_ids_per_ep_rank = None
    weights, ids = lmdeploy.moe_gating_topk_softmax(logits, 2, metadata)
    torch.testing.assert_close(weights, logits.softmax(-1).topk(2).values)
    got = lmdeploy.fused_moe(x, gate_up, down, weights, ids, 2, True, metadata, None)
    want = ops.fused_moe.reference(x, gate_up, down, weights, ids, 2, True)
    torch.testing.assert_close(got, want)


def test_groups_come_from_the_metadata():
    logits = torch.randn(5, 8)
    _, ids = lmdeploy.moe_gating_topk_softmax(logits, 4, MoeMetadata(router_n_groups=4))
    assert torch.equal(ids // 2, torch.arange(4).expand(5, 4))  # one of each group of two


# --- 8 bits


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits(dtype):
    x, residual, weight = torch.randn(1, 5, 16), torch.randn(1, 5, 16), torch.randn(16)
    numbers, scale = w8a8.dynamic_quant(x, dtype)
    want, want_scale = ops.dynamic_quant(x, dtype)
    assert torch.equal(numbers.float(), want.float())
    assert torch.equal(scale, want_scale)
    normed, norm_scale = w8a8.rms_norm_w8a8(x, weight, 1e-5, dtype)
    torch.testing.assert_close(
        normed.float() * norm_scale, ops.rms_norm(x, weight, 1e-5), rtol=0.07, atol=0.02
    )
    *_, total = w8a8.rms_norm_w8a8(x, weight, 1e-5, dtype, residual)
    assert torch.equal(total, x + residual)
    layer, layer_scale = ops.dynamic_quant(torch.randn(8, 16), dtype)
    bias = torch.randn(8)
    got = w8a8.linear_w8a8(numbers, layer, scale, layer_scale, torch.float32, dtype, bias)
    wide = (numbers.float() * scale) @ (layer.float() * layer_scale).t() + bias
    torch.testing.assert_close(got, wide)


def test_static_eight_bits():
    x, weight = torch.randn(1, 5, 16), torch.randint(-127, 128, (8, 16), dtype=torch.int8)
    scale, offset = torch.tensor([0.05]), torch.tensor([3], dtype=torch.int8)
    deq, bias = torch.rand(8) / 100, torch.randint(-99, 99, (8,), dtype=torch.int32)
    got = w8a8.linear_w8a8_static(x, weight, scale, offset, deq, torch.float32, torch.int8, bias)
    numbers = (x / 0.05 + 3).round().clamp(-128, 127)
    torch.testing.assert_close(got, (numbers @ weight.float().t() + bias) * deq)


def test_eight_bit_experts():
    x, weights, ids = torch.randn(5, 16), torch.rand(5, 2), torch.randint(0, 4, (5, 2))
    gate_up, gate_up_scale = ops.dynamic_quant(torch.randn(4, 24, 16), torch.int8)
    down, down_scale = ops.dynamic_quant(torch.randn(4, 16, 12), torch.int8)
    tensors = (x, gate_up, gate_up_scale, down, down_scale, weights, ids)
    got = lmdeploy.fused_moe_w8a8(*tensors, 2, True, MoeMetadata())
    wide = ops.fused_moe(x, gate_up * gate_up_scale, down * down_scale, weights, ids, 2, True)
    assert (got - wide).abs().max() < wide.abs().max() / 30
    with pytest.raises(UnsupportedFeatureError, match="ep_size=2"):
        lmdeploy.fused_moe_w8a8(*tensors, 2, True, MoeMetadata(ep_size=2))
    with pytest.raises(UnsupportedFeatureError, match="PER_TENSOR"):
        w8a8.dynamic_quant(x, torch.int8, "PER_TENSOR")
