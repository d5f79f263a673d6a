"""Whole models of the installed transformers: how often each rule fires in two layers, and the same greedy tokens.

Models whose norms are LayerNorm have no count for the norms; those whose rotation the rules leave alone say why.
"""

from typing import Any

import pytest
import torch
import transformers

from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.fusion.add_rms_norm import ADD_RMS_NORM
from dlinfer.graph.passes.fusion.rms_norm import RMS_NORM
from dlinfer.graph.passes.fusion.rotary import ROTARY
from dlinfer.graph.passes.fusion.rotary_interleaved import ROTARY_INTERLEAVED
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS
from tests.graph.passes.fusion.capturing import CapturedGraph, captured

pytestmark = pytest.mark.slow

RULES = (RMS_NORM, ADD_RMS_NORM, ROTARY, ROTARY_INTERLEAVED)

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 16}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}

# (rms_norm, add_rms_norm, rotary, rotary_interleaved): a decoder layer has two norms and two sums. The first norm
# follows the embedding, which is no sum, and nothing but the final norm reads the last sum.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "llama": ({}, (5, 3, 2, 0)),
    "qwen3": (HEADS, (9, 3, 2, 0)),  # a norm of the heads of query and key
    "mixtral": ({"num_local_experts": 4}, (5, 3, 2, 0)),
    "gemma": (HEADS, (5, 3, 2, 0)),
    "gemma2": (HEADS, (9, 3, 2, 0)),
    "gemma3_text": (HEADS, (13, 3, 2, 0)),
    "granite": ({}, (5, 3, 2, 0)),
    "olmo2": ({}, (9, 0, 2, 0)),  # normalises before the sum, so that no sum is normalised but the last
    "phi3": ({}, (5, 3, 2, 0)),
    "phi": ({}, (0, 0, 2, 0)),
    "gpt_neox": ({}, (0, 0, 2, 0)),
    "stablelm": ({}, (0, 0, 2, 0)),
    "glm4": (HEADS, (9, 3, 0, 4)),
    "helium": (HEADS, (5, 3, 0, 4)),
    "ernie4_5": ({}, (5, 3, 0, 4)),
    "cohere": ({}, (3, 0, 0, 4)),  # its norm subtracts the mean, which the RMS norm of the difference follows
    "gptj": (GPT, (0, 0, 0, 4)),
    "deepseek_v3": (MLA, (9, 3, 0, 4)),
    "gpt_oss": ({**HEADS, "num_local_experts": 4}, (5, 3, 0, 0)),  # its tables are of half the size
    "nanochat": ({}, (10, 3, 0, 0)),  # turns the other way round
}


def fired(one: CapturedGraph) -> tuple[int, ...]:
    REMOVE_NOOPS.run(one.graph_module)
    CSE.run(one.graph_module)
    DCE.run(one.graph_module)
    return tuple(one.fuse(rule) for rule in RULES)


# One of each way to write a rotation, and of the ways to write a norm, with the others; these share what they are.
QUICK = ("gemma3_text", "gptj", "deepseek_v3")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in MODELS]
)
def test_causal_model(family):
    changes, counts = MODELS[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    one = captured(lambda ids: model(ids, use_cache=False).logits, torch.randint(3, 128, (2, 7)))
    want, strides = one.run()[0], one.strides()
    assert fired(one) == counts
    logits = one.run()[0]
    assert torch.equal(logits.argmax(-1), want.argmax(-1))
    # Two layers pass the norms' last bits on; no logit here is larger than 2.
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
    assert one.strides() == strides


@pytest.mark.full
def test_t5_encoder():
    config = transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=128)
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(config).eval()
    one = captured(lambda ids: model(ids).last_hidden_state, torch.randint(3, 128, (2, 7)))
    want = one.run()
    assert fired(one) == (5, 3, 0, 0)
    torch.testing.assert_close(one.run(), want, rtol=1e-5, atol=1e-5)
