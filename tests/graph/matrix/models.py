"""The architectures of the model matrix: transformers' own classes, each with a tiny configuration.

Weights are random but not small: transformers' initialisation (normal, 0.02, norms of ones) makes logits near
zero, where every error hides. ``build`` scales matrices by their fan-in and moves norms away from one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB = 101
CACHE_LENGTH = 32
"""Tokens that a static cache holds: the longest prompt and the decode steps behind it."""

_TEXT: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER: dict[str, Any] = _TEXT | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ENCODER: dict[str, Any] = _DECODER | {"type_vocab_size": 2}
_ENCODER_DECODER: dict[str, Any] = _TEXT | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
}
_SPEECH: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": VOCAB,
}


_MAMBA: dict[str, Any] = _TEXT | {
    "hidden_size": 64,
    "state_size": 8,
    "num_hidden_layers": 2,
    "time_step_rank": 4,
}
_SCAN = "transformers' scan fixes the length, so each prompt length is a compilation with any backend"


@dataclass(frozen=True)
class Architecture:
    """One row of the matrix.

    name: what filters and the table call it.
    kind: decoder, encoder, encoder-decoder, moe, mla, vision, speech, state-space.
    model, config: names of transformers' classes.
    options: what the tiny configuration sets.
    inputs: how the model is called, a key of ``calls.PLANS``.
    call: keyword arguments of every call. note: what the table says besides.
    most_compilations: allowed with default settings, size-1 variants not counted: one with fixed sizes, and one or
        two more while Dynamo learns which sizes vary.
    """

    name: str
    kind: str
    model: str
    config: str
    options: Mapping[str, Any]
    inputs: str
    call: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    most_compilations: int = 3


def _generator(kind: str, name: str, prefix: str, base: Mapping[str, Any], **options: Any) -> Architecture:
    return Architecture(
        name, kind, f"{prefix}ForCausalLM", f"{prefix}Config", {**base, **options}, "generator"
    )


def _decoder(name: str, prefix: str, **options: Any) -> Architecture:
    return _generator("decoder", name, prefix, _DECODER, **options)


def _moe(name: str, prefix: str, **options: Any) -> Architecture:
    return _generator("moe", name, prefix, _DECODER | _EXPERTS, **options)


def _encoder(name: str, prefix: str, **options: Any) -> Architecture:
    return Architecture(
        name, "encoder", f"{prefix}ForMaskedLM", f"{prefix}Config", _ENCODER | options, "encoder"
    )


def _translator(name: str, model: str, config: str, options: Mapping[str, Any]) -> Architecture:
    return Architecture(name, "encoder-decoder", model, config, options, "encoder-decoder")


def _vision(
    name: str, model: str, config: str, call: Mapping[str, Any] | None = None, **options: Any
) -> Architecture:
    return Architecture(name, "vision", model, config, options, "vision", call or {})


ARCHITECTURES: tuple[Architecture, ...] = (
    _decoder("llama", "Llama"),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", head_dim=16),
    _decoder("mistral", "Mistral", sliding_window=None),
    _decoder("gemma", "Gemma", head_dim=16),
    _decoder("gemma2", "Gemma2", head_dim=16, query_pre_attn_scalar=16, sliding_window=12),
    Architecture(
        "gemma3",
        "decoder",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _DECODER | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12},
        "generator",
    ),
    _decoder("phi", "Phi", num_key_value_heads=4),
    _decoder("phi3", "Phi3", sliding_window=None),
    Architecture(
        "gpt2",
        "decoder",
        "GPT2LMHeadModel",
        "GPT2Config",
        _TEXT | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "generator",
    ),
    _decoder("gpt-neox", "GPTNeoX"),
    _generator(
        "decoder", "gpt-j", "GPTJ", _TEXT, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8
    ),
    _decoder("opt", "OPT", ffn_dim=96, word_embed_proj_dim=64),
    _generator("decoder", "bloom", "Bloom", _TEXT, hidden_size=64, n_layer=2, n_head=4),
    _decoder("falcon", "Falcon", num_kv_heads=2, new_decoder_architecture=True),
    _decoder("stablelm", "StableLm"),
    _decoder("cohere", "Cohere"),
    _decoder("olmo2", "Olmo2"),
    _decoder("glm", "Glm", head_dim=16),
    _decoder("glm4", "Glm4", head_dim=16),
    _decoder("granite", "Granite"),
    _decoder("smollm3", "SmolLM3"),
    _decoder("starcoder2", "Starcoder2", sliding_window=None),
    _decoder("nemotron", "Nemotron"),
    _encoder("bert", "Bert"),
    _encoder("roberta", "Roberta"),
    _encoder("distilbert", "DistilBert", dim=64, hidden_dim=96, n_layers=2, n_heads=4),
    _encoder("electra", "Electra", embedding_size=32),
    _encoder(
        "deberta-v2",
        "DebertaV2",
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
    ),
    _encoder("modernbert", "ModernBert", local_attention=8, cls_token_id=1, sep_token_id=2),
    _encoder("albert", "Albert", embedding_size=32),
    _translator(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        _TEXT
        | {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    _translator("bart", "BartForConditionalGeneration", "BartConfig", _ENCODER_DECODER),
    _translator("mbart", "MBartForConditionalGeneration", "MBartConfig", _ENCODER_DECODER),
    _translator("marian", "MarianMTModel", "MarianConfig", _ENCODER_DECODER),
    _translator("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", _ENCODER_DECODER),
    _moe("mixtral", "Mixtral", num_local_experts=4, sliding_window=None),
    _moe("qwen2-moe", "Qwen2Moe", shared_expert_intermediate_size=48, decoder_sparse_step=1),
    _moe("qwen3-moe", "Qwen3Moe", head_dim=16, decoder_sparse_step=1),
    _moe("olmoe", "Olmoe"),
    _moe("granite-moe", "GraniteMoe", num_local_experts=4),
    _moe("gpt-oss", "GptOss", num_local_experts=4, head_dim=16, sliding_window=12),
    _generator("mla", "deepseek-v2", "DeepseekV2", _DECODER | _MLA, topk_method="group_limited_greedy"),
    _generator("mla", "deepseek-v3", "DeepseekV3", _DECODER | _MLA),
    _vision("vit", "ViTModel", "ViTConfig", {"interpolate_pos_encoding": True}, **_VISION),
    _vision(
        "clip-vision", "CLIPVisionModel", "CLIPVisionConfig", {"interpolate_pos_encoding": True}, **_VISION
    ),
    _vision(
        "siglip-vision",
        "SiglipVisionModel",
        "SiglipVisionConfig",
        {"interpolate_pos_encoding": True},
        **_VISION,
    ),
    _vision("dinov2", "Dinov2Model", "Dinov2Config", **_VISION),
    Architecture(
        "swin",
        "vision",
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "fixed-image",
        note="one image size: with a symbolic height Dynamo alone takes three minutes a compilation",
    ),
    _vision(
        "convnext",
        "ConvNextModel",
        "ConvNextConfig",
        num_stages=2,
        hidden_sizes=[32, 64],
        depths=[2, 2],
        patch_size=4,
    ),
    _vision(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=5,
    ),
    Architecture(
        "whisper",
        "speech",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _ENCODER_DECODER | {"num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 64},
        "whisper",
    ),
    Architecture("wav2vec2", "speech", "Wav2Vec2ForCTC", "Wav2Vec2Config", _SPEECH, "waveform"),
    Architecture("hubert", "speech", "HubertForCTC", "HubertConfig", _SPEECH, "waveform"),
    Architecture(
        "clip",
        "vision",
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": _DECODER | {"num_key_value_heads": 4, "projection_dim": 32},
            "vision_config": _VISION | {"projection_dim": 32},
            "projection_dim": 32,
        },
        "image-text",
    ),
    Architecture(
        "mamba",
        "state-space",
        "MambaForCausalLM",
        "MambaConfig",
        _MAMBA,
        "generator",
        note=_SCAN,
        most_compilations=4,
    ),
    Architecture(
        "falcon-mamba",
        "state-space",
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        _MAMBA,
        "generator",
        note=_SCAN,
        most_compilations=4,
    ),
)

LEFT_OUT = {
    "mpt": "reads the cache's length with item(), so Dynamo breaks the graph in every layer with any backend and "
    "compiles the layers' code four times; its results are right",
    "mamba2": "aot_eager fails on its second batch size (a view of the chunked scan); with dlinfer torch was still "
    "simplifying its chunk arithmetic after some minutes, when it was stopped",
}
"""Architectures that were tried and are not in the matrix, with the reason."""


def build(architecture: Architecture, seed: int = 0) -> Any:
    """The model in float32 and eval mode, with random weights that give results of magnitude one."""
    import torch
    import transformers

    config = getattr(transformers, architecture.config)(**architecture.options)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture.model)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
                continue
            one = parameter[0, 0] if ".experts." in name else parameter[0]
            parameter.copy_(noise / one.numel() ** 0.5)
    return model
