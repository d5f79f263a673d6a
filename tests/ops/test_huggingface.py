"""Hugging Face transformers' own modules as a second oracle; 16-bit results equal theirs where an op says so."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from dlinfer import ops, vendor
from tests.ops import cases

pytestmark = [
    pytest.mark.parametrize("vendor_name", ["cpu", "reference"]),
    pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.short),
]


@pytest.fixture(autouse=True)
def on_vendor(vendor_name, clean_state):
    vendor.use(vendor_name)
    torch.manual_seed(0)


def close(op: str, got: Tensor, want: Tensor) -> None:
    """Within twice the op's tolerance, since both sides round."""
    tolerance = ops.registry()[op].tolerances[got.dtype]
    torch.testing.assert_close(got, want, rtol=2 * tolerance.rtol, atol=2 * tolerance.atol)


def test_rms_norm(dtype, vendor_name):
    norm = modeling_llama.LlamaRMSNorm(64, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(1, 33, 64).to(dtype)
    got, want = ops.rms_norm(x, norm.weight.detach(), 1e-5), norm(x).detach()
    if vendor_name == "reference":
        assert torch.equal(got, want)
    close("rms_norm", got, want)


def test_apply_rotary_pos_emb_is_bitwise_equal(dtype):
    rope = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=4))
    cos, sin = rope(torch.empty(0, dtype=dtype), torch.arange(40, 52)[None])
    qkv = torch.randn(12, 8, 32).to(dtype)
    q, k = qkv[:, :4], qkv[:, 4:6]
    want = modeling_llama.apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    for one, other in zip(ops.apply_rotary_pos_emb(q, k, cos[0], sin[0]), want, strict=True):
        assert torch.equal(one, other[0])


def test_gated_mlp_is_bitwise_equal_in_16_bits(dtype):
    mlp = modeling_llama.LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48)).to(dtype)
    x = torch.randn(1, 9, 32).to(dtype)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
    hidden = ops.silu_and_mul(torch.cat([ops.linear(x, w) for w in gate_up.chunk(2)], dim=-1))
    got, want = ops.linear(hidden, mlp.down_proj.weight.detach()), mlp(x).detach()
    if dtype is not torch.float32:  # in float32 torch's vector and scalar exp differ in the last bit
        assert torch.equal(got, want)
    close("linear", got, want)


# --- attention


def qkv(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(11, heads, 16).to(dtype) for heads in (4, 2, 2))  # type: ignore[return-value]


def causal_mask(length: int, window: int, dtype: torch.dtype) -> Tensor:
    """HF's sliding window: ``window`` tokens, the query's own included."""
    there, here = torch.arange(length), torch.arange(length)[:, None]
    seen = (there <= here) & (there > here - window)
    return torch.zeros(length, length, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def eager(
    module, q: Tensor, k: Tensor, v: Tensor, window: int = 99, sinks: Tensor | None = None, **extra
) -> Tensor:
    states = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks, head_dim=16)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = causal_mask(len(q), window, q.dtype)
    return module.eager_attention_forward(states, *heads_first, mask, scaling=0.25, dropout=0.0, **extra)[0][
        0
    ]


def prefill(q: Tensor, k: Tensor, v: Tensor, **extra) -> Tensor:
    length = torch.tensor([len(q)])
    return ops.prefill_attention(q, k, v, None, None, length, length, len(q), 4, 2, [], **extra)


def test_attention(dtype):
    inputs = qkv(dtype)
    close("prefill_attention", prefill(*inputs), eager(modeling_llama, *inputs))


def test_hfs_sliding_window_of_4_is_a_left_bound_of_3(dtype):
    inputs = qkv(dtype)
    close("prefill_attention", prefill(*inputs, sliding_window=3), eager(modeling_llama, *inputs, window=4))


def test_soft_cap_of_gemma2(dtype):
    inputs = qkv(dtype)
    got, want = prefill(*inputs, logit_softcapping=2.0), eager(modeling_gemma2, *inputs, softcap=2.0)
    close("prefill_attention", got, want)


def test_sinks_of_gpt_oss(dtype):
    inputs, sinks = qkv(dtype), torch.randn(4).to(dtype)
    got, want = prefill(*inputs, sinks=sinks), eager(modeling_gpt_oss, *inputs, sinks=sinks)
    close("prefill_attention", got, want)


def test_alibi_equals_a_bias_that_grows_with_the_key_position(dtype):
    """HF's Bloom adds slope * key position; within a row that differs from ours by a constant."""
    q, k, v = qkv(dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * 0.25
    scores = (
        scores + slopes.double()[:, None, None] * torch.arange(11) + causal_mask(11, 99, torch.float64)[0]
    )
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double().repeat_interleave(2, 1)).to(dtype)
    close("prefill_attention", prefill(q, k, v, alibi_slopes=slopes), want)


# --- mixture of experts


@pytest.mark.parametrize("tokens", [1, 40])
def test_mixtral_block(tokens, dtype):
    config = MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    experts, router = modeling_mixtral.MixtralExperts(config), modeling_mixtral.MixtralTopKRouter(config)
    for parameter in (*experts.parameters(), *router.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    experts, router = experts.to(dtype), router.to(dtype)
    x = torch.randn(tokens, 32).to(dtype)
    with torch.no_grad():
        logits, want_weights, want_ids = router(x)
        want = experts(x, want_ids, want_weights)
    weights, ids = ops.moe_gating_topk_softmax(logits, 2, None)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), want_weights)
    gate_up, down = (experts.get_parameter(name).detach() for name in ("gate_up_proj", "down_proj"))
    close("fused_moe", ops.fused_moe(x, gate_up, down, weights, ids, 2, True), want)
