"""What is built: one row a model family, in sizes that make greedy tokens of random weights worth comparing.

``initializer_range`` 0.2 (ten times the usual) makes attention and experts choose sharply, so that random
models neither repeat one token for ever nor leave the two best tokens within rounding distance of each other.
"""

from dataclasses import dataclass, field, replace
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
    """``hf_name`` begins transformers' ``...ForCausalLM``; ``exercises``: what for."""

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

# The length that rope types below were trained for, as it were: the tests' prompts lie on both sides of it.
ORIGINAL_LENGTH = 64


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


_YARN = _rope("yarn", factor=16.0, original_max_position_embeddings=ORIGINAL_LENGTH)
_LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL_LENGTH,
)


def _longrope(short_factor: list[float], long_factor: list[float]) -> dict[str, Any]:
    # Phi-3's configurations have the length beside the rope parameters as well.
    own = {"original_max_position_embeddings": ORIGINAL_LENGTH}
    return _rope("longrope", short_factor=short_factor, long_factor=long_factor, **own) | own


def _scaled(longrope: dict[str, Any], **scales: float) -> dict[str, Any]:
    return longrope | {"rope_parameters": longrope["rope_parameters"] | scales}


_LONGROPE = _longrope([1.0 + 0.1 * i for i in range(8)], [1.0 + 2.0 * i for i in range(8)])
_LONGROPE_OF_A_PART = _longrope([1.0 + 0.1 * i for i in range(6)], [1.0 + 2.0 * i for i in range(6)]) | {
    "head_dim": 16,
    "partial_rotary_factor": 0.75,
}
_GEMMA = {"head_dim": 16, "tie_word_embeddings": True}

# Enough layers, and scores of such a size, that a text says what comes next, and not its last token alone.
_SHARP = {"num_hidden_layers": 4, "query_pre_attn_scalar": 4, "initializer_range": 0.1}

# Models that differ in what they make of positions: rope types, and windows.
POSITIONAL: dict[str, Family] = {
    "llama_linear": Family("Llama", "linear scaling", _rope("linear", factor=4.0)),
    "llama_dynamic": Family(
        "Llama",
        "dynamic NTK scaling: frequencies depend on the length of the text",
        _rope("dynamic", factor=4.0) | {"max_position_embeddings": ORIGINAL_LENGTH},
    ),
    "llama_llama3": Family("Llama", "Llama 3.1's frequencies", _LLAMA3),
    "llama_yarn": Family("Llama", "YaRN", _YARN),
    "qwen2_yarn": Family("Qwen2", "YaRN with bias on q, k and v", _YARN),
    "phi3_longrope": Family(
        "Phi3", "longrope, computed anew where a text outgrows the original length", _LONGROPE
    ),
    "glm4": Family(
        "Glm4", "rotary on half of each head, in pairs", {"head_dim": 16, "partial_rotary_factor": 0.5}
    ),
    "mistral_window": Family("Mistral", "a sliding window in every layer", {"sliding_window": 16}),
    "gemma": Family("Gemma", "scaled embeddings, norm weights around zero", _GEMMA),
    "gemma2_window": Family(
        "Gemma2",
        "a sliding window in every second layer, soft-capped scores",
        _GEMMA | _SHARP | {"sliding_window": 16},
    ),
    "gemma3_window": Family(
        "Gemma3",
        "sliding windows with frequencies of their own",
        _GEMMA
        | _SHARP
        | {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        "latent attention, whose keys are wider than values; rotary on a part of the head; YaRN",
        _YARN
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,  # this and the next are of the original configuration, which LMDeploy reads
            "scoring_func": "softmax",
            "n_group": 1,
            "topk_group": 1,
        },
        dense=False,
    ),
    "internlm3": Family(
        "Llama",
        "remote-code config; biases everywhere; dynamic NTK scaling",
        _rope("dynamic", factor=6.0)
        | {"max_position_embeddings": ORIGINAL_LENGTH, "attention_bias": True, "mlp_bias": True},
    ),
    "phi4_longrope": Family("Phi3", "longrope on three quarters of a head", _LONGROPE_OF_A_PART),
    "qwen2_window": Family(
        "Qwen2",
        "a sliding window in the upper layers only",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "mixtral_window": Family(
        "Mixtral",
        "experts, and a sliding window that LMDeploy's class passes over",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
        dense=False,
    ),
    "qwen3_yarn": Family("Qwen3", "YaRN with q/k norms", _YARN | {"head_dim": 32}),
    "glm4_moe": Family(
        "Glm4Moe",
        "experts chosen by sigmoids and a correction, of the best group; rotary on half of each head",
        _SHARP
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        dense=False,
    ),
    "gpt_oss": Family(
        "GptOss",
        "attention sinks, windows in every second layer; experts with biases and a clamped activation",
        _SHARP
        | _rope("yarn", factor=32.0, truncate=False, original_max_position_embeddings=ORIGINAL_LENGTH)
        | {"head_dim": 16, "sliding_window": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
        dense=False,
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        "layers of gated linear attention, whose states are of a sequence; experts",
        MOE
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 32,
            "shared_expert_intermediate_size": 96,
            "norm_topk_prob": True,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
        dense=False,
    ),
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}

# DeepSeek-V3's experts.
_GROUPS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

# Few tokens are chosen, so that prompts are sparse; so many heads that two tokens seldom score the same, which those do
# that every head passes over.
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16}

_COMPRESSED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 2.0,
    **_INDEXER,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
}

_PHIMOE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "lm_head_bias": True,
    # The two jitters of Phi-3.5-MoE: of the router's scores, in use always, and of its input, in training alone.
    "router_jitter_noise": 0.01,
    "input_jitter_noise": 0.01,
}

_MINICPM3: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 32,
}

# Classes of LMDeploy's that share much with the ones above, and differ in what they route, pack or call things.
FURTHER: dict[str, Family] = {
    "deepseek": Family(
        "Qwen2Moe",
        "remote-code config; experts beside a shared one that nothing gates, a dense first layer",
        MOE
        | {
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
            "qkv_bias": False,
            "mlp_only_layers": [0],
        },
        dense=False,
    ),
    "deepseek_v2_groups": Family(
        "DeepseekV2",
        "experts of the best groups only, chosen by a softmax over all, with scaled weights",
        _LATENT
        | {
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 4.0,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy",
        },
        dense=False,
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        "latent attention; experts in groups, chosen by sigmoids and a correction bias",
        _LATENT | _GROUPS,
        dense=False,
    ),
    "deepseek_v32": Family(
        "DeepseekV32",
        "latent attention to the 8 tokens that an indexer chooses; YaRN that scales scores",
        _LATENT
        | _INDEXER
        | _GROUPS
        | _rope(
            "yarn",
            factor=16.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=ORIGINAL_LENGTH,
        ),
        dense=False,
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsa",
        "an indexer that turns pairs, whose choice the next layer takes over",
        _LATENT
        | _INDEXER
        | _GROUPS
        | {
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "full"],
        },
        dense=False,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLite",
        "DeepSeek-V3's layers under another name, without groups",
        _LATENT
        | {
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        dense=False,
    ),
    "deepseek_v4": Family(
        "DeepseekV4",
        "a window and compressed entries, all or an indexer's choice; streams of hidden states; hashed experts",
        _COMPRESSED,
        dense=False,
    ),
    "hy3": Family(
        "HYV3",
        "q/k norms; experts chosen by sigmoids and a bias, beside a shared one",
        MOE
        | {
            "head_dim": 32,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "enable_moe_fp32_combine": True,
        },
        dense=False,
    ),
    "chatglm": Family(
        "Glm",
        "remote-code config; rotary on pairs of half of each head, q, k and v in one weight with biases",
        {"head_dim": 16},
    ),
    "phimoe": Family(
        "Phimoe",
        "two experts, each weighed among those of like score; LayerNorms, biases, a window, tied embeddings",
        _PHIMOE | {"sliding_window": 16, "tie_word_embeddings": True},
        dense=False,
    ),
    "phimoe_longrope": Family(
        "Phimoe",
        "longrope whose scale the checkpoint gives, computed anew where a text outgrows the original length",
        _PHIMOE | _scaled(_LONGROPE, short_mscale=1.2, long_mscale=1.4),
        dense=False,
    ),
    "minicpm3": Family(
        "MiniCPM3",
        "keys and values made of a latent, cached in full; scaled embeddings, layers and logits",
        _MINICPM3,
    ),
    "minicpm3_longrope": Family(
        "MiniCPM3",
        "longrope on the rotated part of a head, never computed anew; tied embeddings",
        _MINICPM3
        | _longrope([1.0 + 0.1 * i for i in range(4)], [1.0 + 2.0 * i for i in range(4)])
        # With embeddings as large as MiniCPM3's a tied head says the last token again, whatever the layers add.
        | {"tie_word_embeddings": True, "scale_emb": 1},
    ),
}

# Families whose configuration is saved as it was released -> the class that it names, which is LMDeploy's.
RELEASED = {
    "phimoe_longrope": "PhiMoEForCausalLM",
    "minicpm3_longrope": "MiniCPM3ForCausalLM",
}

# Tests compare only the tokens of these families, with fewer options than for the first ones.
BRIEF = POSITIONAL | FURTHER

# Models that score a text in place of continuing it.
REWARD: dict[str, Family] = {
    "qwen2_reward": Family("Qwen2", "two linear layers in place of the vocabulary"),
    "internlm2_reward": Family("Llama", "remote-code config; one linear layer in place of the vocabulary"),
}

# Weights of 4 bits.
QUANTISED: dict[str, Family] = {
    "llama_awq": Family("Llama", "AWQ: packed weights without biases"),
    "llama_awq_groups": Family("Llama", "AWQ: whole groups for two ranks", {"num_key_value_heads": 4}),
    "qwen2_awq": Family(
        "Qwen2",
        "AWQ: packed q, k and v with biases; more columns than a kernel's block, and a part of one",
        {"tie_word_embeddings": True, "intermediate_size": 288},
    ),
}

# Models that generate a block of tokens at a time.
DIFFUSION: dict[str, Family] = {
    "sdar": Family(
        "Qwen3",
        "remote-code config; decodes by block diffusion; tied embeddings",
        {"head_dim": 32, "tie_word_embeddings": True},
    ),
    "sdar_moe": Family(
        "Qwen3Moe",
        "remote-code config; decodes by block diffusion, with experts",
        MOE | {"head_dim": 32, "norm_topk_prob": True},
        dense=False,
    ),
}

# Models that LMDeploy has no class for.
ELSEWHERE: dict[str, Family] = {
    "olmo2": Family("Olmo2", "norms behind attention and MLP, and over all of q and of k"),
}

# In sizes that a device's own kernels ask for (tests/e2e/devices).
SIZED: dict[str, Family] = {
    "deepseek_v2_latent": replace(
        POSITIONAL["deepseek_v2"],
        exercises="latent attention in DeepSeek's own sizes, 512 and 64",
        overrides=POSITIONAL["deepseek_v2"].overrides | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    ),
}
