"""What is built: one row a model family, in sizes that make greedy tokens of random weights worth comparing.

``initializer_range`` 0.2 (ten times the usual) makes attention and experts choose sharply, so that random
models neither repeat one token for ever nor leave the two best tokens within rounding distance of each other.
"""

from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 1000
BOS, EOS, IM_END = 1, 2, 4

# Either ends a text, as in the chat models of these families.
STOP_IDS = [EOS, IM_END]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}

MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Family:
    """``hf_name`` begins transformers' ``...Config`` and ``...ForCausalLM``; ``exercises``: what for."""

    hf_name: str
    exercises: str
    overrides: dict[str, Any] = field(default_factory=dict)
    dense: bool = True

    @property
    def config(self) -> dict[str, Any]:
        return COMMON | self.overrides


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", "grouped-query attention"),
    "qwen2": Family("Qwen2", "bias on q, k and v; tied embeddings", {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3", "RMS norm on each head of q and k; head_dim of its own", {"head_dim": 32}),
    "internlm2": Family("Llama", "remote-code config; q, k and v packed into one interleaved weight"),
    "mixtral": Family(
        "Mixtral",
        "mixture of experts, weights renormalised over the chosen ones",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        dense=False,
    ),
    "qwen2_moe": Family(
        "Qwen2Moe",
        "mixture of experts beside a gated shared expert, no renormalisation",
        MOE | {"shared_expert_intermediate_size": 96, "norm_topk_prob": False},
        dense=False,
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        "mixture of experts behind q/k-normed attention, renormalised",
        MOE | {"head_dim": 32, "norm_topk_prob": True},
        dense=False,
    ),
}
