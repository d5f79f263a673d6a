"""``attn_implementation="dlinfer"`` against transformers' own eager attention: logits, tokens, and what is refused."""

from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import dlinfer
from dlinfer.errors import InferenceOnlyError, UnsupportedFeatureError
from dlinfer.framework.transformers_ext import attention, one_query
from dlinfer.framework.transformers_ext.attention import attention_forward

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    dlinfer.transformers.register_attention()
    dlinfer.transformers.register_attention()


def make(name: str) -> Any:
    kind, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | own)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 11, 10 and 7 tokens, padded on the left."""
    ids = torch.randint(3, 64, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :1] = 0, 0
    return ids * mask, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_padded_batches(name: str, dtype: torch.dtype) -> None:
    """float32: sums in another order. bfloat16: eager attention rounds scores and probabilities, the op does not."""
    model = make(name).to(dtype)
    ids, mask = batch()
    tolerance = 2e-6 if dtype is torch.float32 else 6e-2
    for padded in (mask, mask.flip(1)):
        logits = {}
        for implementation in ("eager", "dlinfer"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                logits[implementation] = model(ids, attention_mask=padded).logits[padded.bool()].float()
        error = (logits["eager"] - logits["dlinfer"]).abs().max()
        assert error < tolerance * logits["eager"].abs().max().clamp(min=1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_generate(name: str, cache: str) -> None:
    model = make(name)
    ids, mask = batch()
    tokens = {}
    for implementation in ("eager", "dlinfer"):
        model.set_attn_implementation(implementation)
        given = GenerationConfig(
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=2,
            cache_implementation=cache,
            disable_compile=True,
        )
        tokens[implementation] = model.generate(ids, attention_mask=mask, generation_config=given)
    assert torch.equal(tokens["eager"], tokens["dlinfer"])


def test_beams_and_a_conversation_that_goes_on() -> None:
    model = make("llama")
    ids, mask = batch()
    results = {}
    for implementation in ("eager", "dlinfer"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            beams = model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=8, do_sample=False)
            first = model(ids[2:], use_cache=True)
            more = model(ids[:1, 4:], past_key_values=first.past_key_values)
        results[implementation] = (beams, more.logits)
    assert torch.equal(results["eager"][0], results["dlinfer"][0])
    torch.testing.assert_close(results["eager"][1], results["dlinfer"][1], rtol=1e-5, atol=1e-6)


def test_an_encoder_and_an_encoder_with_a_decoder() -> None:
    small: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    torch.manual_seed(0)
    bert = transformers.BertModel(
        transformers.BertConfig(vocab_size=64, intermediate_size=48, **small)
    ).eval()
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
        )
    ).eval()
    ids, mask = batch()
    for model in (bert, bart):
        found = {}
        for implementation in ("eager", "dlinfer"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                found[implementation] = model(ids, attention_mask=mask)[0][mask.bool()]
        torch.testing.assert_close(found["dlinfer"], found["eager"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_the_users_own(kind: str) -> None:
    """Every third key is hidden, which no run describes."""
    model = make("llama")
    ids, _ = batch()
    seen = torch.ones(3, 1, 11, 11, dtype=torch.bool).tril() & (torch.arange(11) % 3 != 1)
    mask = (
        seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    )
    found = {}
    for implementation in ("sdpa", "dlinfer"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found["dlinfer"], found["sdpa"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", pytest.param("dlinfer", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_under_a_compiler(name: str, backend: str) -> None:
    model = make(name)
    model.set_attn_implementation("dlinfer")
    ids, mask = batch()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        compiled = torch.compile(model, backend=backend, fullgraph=True)(ids, attention_mask=mask).logits
    torch.testing.assert_close(compiled[mask.bool()], expected, rtol=1e-4, atol=1e-5)


class Layer(torch.nn.Module):
    is_causal = True


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_the_op_runs_once_a_sequence_and_copies_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = attention.ops.prefill_attention

    def counted(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(k.data_ptr())
        return original(q, k, *args, **kwargs)

    monkeypatch.setattr(attention.ops, "prefill_attention", counted)
    query, key = heads(2, 4, 2, 16), heads(2, 2, 9, 16)
    mask = torch.ones(2, 1, 2, 9, dtype=torch.bool)
    mask[1, ..., :3] = False
    attention_forward(Layer(), query, key, key, mask)
    assert seen == [key[0].data_ptr(), key[1, :, 3:].data_ptr()]


@pytest.mark.parametrize(
    ("seen", "calls"),
    [
        ([(0, 9), (0, 9), (0, 9)], [3]),
        ([(0, 9), (0, 4), (0, 1)], [3]),  # a static cache
        ([(0, 9), (3, 9), (8, 9)], [1, 1, 1]),  # padding on the left
        ([(2, 6), (5, 9), (0, 4)], [3]),  # a window
        ([(0, 9), (0, 0), (0, 2)], [3]),  # a row that sees nothing
        ([(1, 9), (0, 0), (0, 2)], [1, 1, 1]),
    ],
    ids=str,
)
def test_a_decoding_step_reads_keys_where_they_are(
    seen: list[tuple[int, int]], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    original = one_query.ops.paged_decode_attention

    def counted(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append((len(q), k.untyped_storage().data_ptr()))
        return original(q, k, *args, **kwargs)

    monkeypatch.setattr(one_query.ops, "paged_decode_attention", counted)
    query, key, value = heads(3, 4, 1, 16), heads(3, 2, 9, 16), heads(3, 2, 9, 8)
    mask = torch.zeros(3, 1, 1, 9, dtype=torch.bool)
    for row, (begin, end) in enumerate(seen):
        mask[row, ..., begin:end] = True
    hidden = key.masked_fill(~mask[:, 0, 0, None, :, None].expand_as(key), torch.nan)
    got, _ = attention_forward(Layer(), query, hidden, value, mask)
    assert given == [(count, hidden.untyped_storage().data_ptr()) for count in calls]
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(got, want.transpose(1, 2).nan_to_num(), rtol=1e-5, atol=1e-6)


def test_another_layout_of_caches_leaves_decoding_to_prefill_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(one_query, "kv_order", lambda device: "BHSD")
    monkeypatch.setattr(one_query.ops, "paged_decode_attention", None)
    query, key = heads(2, 4, 1, 16), heads(2, 2, 9, 16)
    got, _ = attention_forward(Layer(), query, key, key, None)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_a_mask_that_is_written_is_read_again() -> None:
    query, key = heads(1, 4, 1, 16), heads(1, 2, 9, 16)
    for inference in (False, True):
        with torch.inference_mode(inference), torch.no_grad():
            mask = torch.ones(1, 1, 1, 9, dtype=torch.bool)
            first, _ = attention_forward(Layer(), query, key, key, mask)
            mask[..., :4] = False
            second, _ = attention_forward(Layer(), query, key, key, mask)
            expected, _ = attention_forward(Layer(), query, key[:, :, 4:], key[:, :, 4:], None)
        assert not torch.equal(first, second)
        torch.testing.assert_close(second, expected)


def test_what_is_refused_by_name() -> None:
    model = make("llama")
    model.set_attn_implementation("dlinfer")
    ids, _ = batch()
    with pytest.raises(InferenceOnlyError, match="LlamaAttention"):
        model(ids)
    query = heads(1, 4, 3, 16)
    with pytest.raises(UnsupportedFeatureError, match="output_attentions"):
        attention_forward(Layer(), query, query, query, None, output_attentions=True)
    with pytest.raises(UnsupportedFeatureError, match="dropout"):
        attention_forward(Layer(), query, query, query, None, dropout=0.1)
    with torch.no_grad(), pytest.raises((UnsupportedFeatureError, ValueError), match="output_attentions"):
        model(ids, output_attentions=True)
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad(), pytest.raises(UnsupportedFeatureError, match="dropout"):
        model(ids)
