"""Vision-language models: one row a family, a language model of the usual size under a small encoder of images.

Patches are of 4 x 4 pixels and 2 x 2 of them become a token, so that images of some dozen pixels have some dozen
tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import kimi_k25
from .families import BOS, COMMON, EOS, FURTHER, MOE, ORIGINAL_LENGTH, POSITIONAL, VOCAB_SIZE

# Tokens of the vocabulary, and then those that stand for images; the model has room for more than there are.
ROOM = VOCAB_SIZE + 24

PATCH, MERGE = 4, 2


@dataclass(frozen=True)
class VisionFamily:
    """``hf_name`` begins transformers' ``...ForConditionalGeneration``; ``exercises``: what for.

    config: of the whole model. extra: the tokenizer's further tokens, from id ``VOCAB_SIZE`` on. image: how the chat
    template writes one. files: name -> JSON, what the processor is made from. renamed: (beginning
    of a weight's name as transformers 5 writes it, as the family's checkpoints have it). joined: whether those have
    one tensor of all experts, for which transformers 5 writes one for each. chat: the language model's
    class where the checkpoint is an InternVLChatModel, for which this model is the oracle. remote: (class, model type)
    of a checkpoint with the same weights, for which this model is the oracle. published: a function that writes such a
    checkpoint to its first folder, from this model's in its second.
    """

    hf_name: str
    exercises: str
    config: dict[str, Any]
    extra: list[str] | dict[str, str]
    image: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    renamed: tuple[str, str] | None = None
    joined: bool = False
    chat: str | None = None
    remote: tuple[str, str] | None = None
    published: Callable[[Path, Path], None] | None = None


_MEAN_AND_STD = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}

_TEXT = COMMON | {"vocab_size": ROOM}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}

_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_QWEN_IDS = {
    f"{name}_token_id": VOCAB_SIZE + place
    for place, name in enumerate(("vision_start", "vision_end", "image", "video"))
}
_QWEN_ENDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS, "tie_word_embeddings": False}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_VISION = {
    "depth": 3,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}


def _qwen_processor(name: str) -> dict[str, dict[str, Any]]:
    return {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": name,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": MERGE,
            "min_pixels": 4 * (PATCH * MERGE) ** 2,
            "max_pixels": 64 * (PATCH * MERGE) ** 2,
            **_MEAN_AND_STD,
        }
    }


_GEMMA3_FIELDS = (
    *"head_dim tie_word_embeddings num_hidden_layers query_pre_attn_scalar initializer_range".split(),
    *"layer_types rope_parameters".split(),
)

_TILE = 32
_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_INTERNVL_SEQ = (_TILE // PATCH // MERGE) ** 2

VISION: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(
        "Qwen2VL",
        "images of any size, positions of three axes",
        {
            **_QWEN_IDS,
            **_QWEN_ENDS,
            "text_config": _TEXT | _MROPE,
            "vision_config": _QWEN_VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        },
        _QWEN_TOKENS,
        _QWEN_IMAGE,
        _qwen_processor("Qwen2VLProcessor"),
    ),
    "qwen2_5_vl": VisionFamily(
        "Qwen2_5_VL",
        "attention within windows of an image, and over all of it in one layer",
        {
            **_QWEN_IDS,
            **_QWEN_ENDS,
            "text_config": _TEXT | _MROPE,
            "vision_config": _QWEN_VISION
            | {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "window_size": 4 * PATCH,
                "fullatt_block_indexes": [1],
            },
        },
        _QWEN_TOKENS,
        _QWEN_IMAGE,
        _qwen_processor("Qwen2_5_VLProcessor"),
    ),
    "internvl": VisionFamily(
        "InternVL",
        "images cut into tiles, with a thumbnail",
        {
            "image_token_id": VOCAB_SIZE + 2,
            "image_seq_length": _INTERNVL_SEQ,
            "tie_word_embeddings": False,
            "text_config": _TEXT | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "attention_bias": True,
                "image_size": [_TILE, _TILE],
                "patch_size": [PATCH, PATCH],
                "initializer_range": 0.2,
            },
        },
        _INTERNVL_TOKENS,
        "<IMG_CONTEXT>\n",
        {
            "preprocessor_config.json": {
                "image_processor_type": "GotOcr2ImageProcessorFast",
                "processor_class": "InternVLProcessor",
                "crop_to_patches": False,
                "min_patches": 1,
                "max_patches": 4,
                "size": {"height": _TILE, "width": _TILE},
                **_MEAN_AND_STD,
            },
            "processor_config.json": {
                "image_seq_length": _INTERNVL_SEQ,
                "processor_class": "InternVLProcessor",
            },
        },
    ),
    "qwen3_vl": VisionFamily(
        "Qwen3VL",
        "features of the encoder's lower layers added in those of the language model",
        {
            **_QWEN_IDS,
            **_QWEN_ENDS,
            "text_config": _TEXT
            | {
                "num_hidden_layers": 3,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": _QWEN_VISION
            | {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        _QWEN_TOKENS,
        _QWEN_IMAGE,
        _qwen_processor("Qwen3VLProcessor"),
    ),
    "llava": VisionFamily(
        "Llava",
        "images of one size, an encoder with attention over all of them",
        {
            "image_token_index": VOCAB_SIZE,
            "image_seq_length": (_TILE // PATCH) ** 2,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": False,
            "text_config": _TEXT | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": _TILE,
                "patch_size": PATCH,
                "projection_dim": 32,
                "initializer_range": 0.2,
            },
        },
        ["<image>"],
        "<image>\n",
        {
            "preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor",
                "processor_class": "LlavaProcessor",
                "size": {"shortest_edge": _TILE},
                "crop_size": {"height": _TILE, "width": _TILE},
                "do_center_crop": True,
                "do_resize": True,
                "do_normalize": True,
                "do_rescale": True,
                "do_convert_rgb": True,
                "resample": 3,
                **_MEAN_AND_STD,
            },
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "patch_size": PATCH,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
                "image_token": "<image>",
            },
        },
        ("vision_tower.", "vision_tower.vision_model."),
    ),
}

_GRID = [[_TILE, 2 * _TILE], [2 * _TILE, _TILE], [2 * _TILE, 2 * _TILE]]
VISION["llava_next"] = replace(
    VISION["llava"],
    hf_name="LlavaNext",
    exercises="images cut into tiles whose padding is left out",
    config=VISION["llava"].config | {"image_grid_pinpoints": _GRID},
    files={
        "preprocessor_config.json": VISION["llava"].files["preprocessor_config.json"]
        | {
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "LlavaNextProcessor",
            "image_grid_pinpoints": _GRID,
        },
        "processor_config.json": VISION["llava"].files["processor_config.json"]
        | {"processor_class": "LlavaNextProcessor"},
    },
)

VISION["gemma3_vl"] = VisionFamily(
    "Gemma3",
    "tokens of an image see each other, also through sliding windows",
    {
        **{f"{name}_token_index": VOCAB_SIZE + place for place, name in enumerate(("image", "boi", "eoi"))},
        "mm_tokens_per_image": (_TILE // PATCH // MERGE) ** 2,
        "text_config": _TEXT
        | {name: POSITIONAL["gemma3_window"].config[name] for name in _GEMMA3_FIELDS}
        | {"sliding_window": 10},  # less than the tokens of an image
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _TILE,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
    },
    {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "<start_of_image>",
    {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": _TILE, "width": _TILE},
            **_MEAN_AND_STD,
        },
        "processor_config.json": {
            "image_seq_length": (_TILE // PATCH // MERGE) ** 2,
            "processor_class": "Gemma3Processor",
        },
    },
    ("vision_tower.", "vision_tower.vision_model."),
)

VISION["qwen3_vl_moe"] = replace(
    VISION["qwen3_vl"],
    hf_name="Qwen3VLMoe",
    exercises="the same with experts, after a dense layer",
    config=VISION["qwen3_vl"].config
    | {
        "text_config": VISION["qwen3_vl"].config["text_config"]
        | MOE
        | {"moe_intermediate_size": 48, "mlp_only_layers": [0]}
    },
)

_OMNI_NAMES = ("image", "video", "audio", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
_OMNI_IDS = {f"{name}_token_id": VOCAB_SIZE + place for place, name in enumerate(_OMNI_NAMES[:3])}
_OMNI_TEXT = dict(VISION["qwen3_vl_moe"].config["text_config"])  # which says nothing of interleaved axes
_OMNI_TEXT["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
VISION["qwen3_omni"] = VisionFamily(
    "Qwen3OmniMoe",
    "the thinker of a model that hears and speaks: Qwen3-VL-MoE inside another configuration",
    {
        "enable_audio_output": False,
        "thinker_config": {
            **_OMNI_IDS,
            "vision_start_token_id": VOCAB_SIZE + _OMNI_NAMES.index("vision_bos"),
            "audio_start_token_id": VOCAB_SIZE + _OMNI_NAMES.index("audio_bos"),
            "text_config": _OMNI_TEXT,
            "vision_config": VISION["qwen3_vl"].config["vision_config"],
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 16,
                "downsample_hidden_size": 8,
                "n_window_infer": 200,  # attention is within two windows
                "output_dim": 64,
                "initializer_range": 0.2,
            },
        },
    },
    {f"{name}_token": f"<|{name}|>" for name in _OMNI_NAMES},
    "<|vision_bos|><|image|><|vision_eos|>",
    _qwen_processor("Qwen3OmniMoeProcessor"),
)
_OMNI_FILE = VISION["qwen3_omni"].files["preprocessor_config.json"]
_OMNI_FILE |= {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16}

# Three linear layers and one of attention, not in the usual order.
_QWEN3_5_TEXT = _TEXT | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_QWEN3_5_VISION = dict(VISION["qwen3_vl"].config["vision_config"])
del _QWEN3_5_VISION["deepstack_visual_indexes"]

VISION["qwen3_5"] = VisionFamily(
    "Qwen3_5",
    "layers of gated linear attention, whose states are of a sequence; gated attention, rotary on half of each head",
    {
        **_QWEN_IDS,
        **_QWEN_ENDS,
        "text_config": _QWEN3_5_TEXT,
        "vision_config": _QWEN3_5_VISION,
    },
    _QWEN_TOKENS,
    _QWEN_IMAGE,
    _qwen_processor("Qwen3VLProcessor"),
)
VISION["qwen3_5_moe"] = replace(
    VISION["qwen3_5"],
    hf_name="Qwen3_5Moe",
    exercises="the same with experts beside a gated shared one",
    config=VISION["qwen3_5"].config
    | {"text_config": _QWEN3_5_TEXT | MOE | {"shared_expert_intermediate_size": 96}},
    joined=True,
)

VISION["interns1"] = replace(
    VISION["internvl"],
    exercises="InternVL around a Qwen3-MoE; remote-code config",
    config=VISION["internvl"].config
    | {
        "text_config": _TEXT
        | MOE
        | {"head_dim": 16, "moe_intermediate_size": 48, "norm_topk_prob": True}
        | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    },
    remote=("InternS1ForConditionalGeneration", "interns1"),
)
VISION["interns2_preview"] = replace(
    VISION["qwen3_5_moe"],
    exercises="Qwen3.5-MoE under another name; remote-code config",
    remote=("InternS2PreviewForConditionalGeneration", "intern_s2_preview"),
)

_LLAMA4_IDS = {
    "boi_token_index": VOCAB_SIZE,
    "eoi_token_index": VOCAB_SIZE + 1,
    "image_token_index": VOCAB_SIZE + 3,
}
VISION["llama4"] = VisionFamily(
    "Llama4",
    "attention in chunks; layers without positions, whose queries are scaled; experts of scaled inputs",
    {
        **_LLAMA4_IDS,
        "text_config": _TEXT
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 64,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "rope_parameters": POSITIONAL["llama_llama3"].config["rope_parameters"],
        },
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32 * MERGE * MERGE,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "vision_output_dim": 48,
            "image_size": _TILE,
            "patch_size": PATCH,
            "initializer_range": 0.2,
        },
    },
    [f"<|{name}|>" for name in "image_start image_end image patch tile_x_separator tile_y_separator".split()],
    "<|image|>",
    {
        "preprocessor_config.json": {
            "image_processor_type": "Llama4ImageProcessor",
            "processor_class": "Llama4Processor",
            "size": {"height": _TILE, "width": _TILE},
            "max_patches": 4,
            **_MEAN_AND_STD,
        },
        "processor_config.json": {"processor_class": "Llama4Processor", "patch_size": PATCH},
    },
)

_KIMI_TEXT = _TEXT | FURTHER["deepseek_v3"].overrides
_KIMI_TEXT |= {
    "model_type": "deepseek_v3",
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
}
VISION["kimi_k25"] = VisionFamily(
    "Kimi_K25",
    "a table of positions resampled for each image, rotary on two axes; DeepSeek-V3's layers; remote-code config",
    {
        "image_token_id": VOCAB_SIZE + kimi_k25.TOKENS.index(kimi_k25.PAD),
        "video_token_id": VOCAB_SIZE + len(kimi_k25.TOKENS) - 1,
        "projection_hidden_size": 32,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "text_config": _KIMI_TEXT,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": kimi_k25.PATCH,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
            "initializer_range": 0.2,
        },
    },
    kimi_k25.TOKENS,
    kimi_k25.IMAGE,
    published=kimi_k25.save,
)

# Families whose language model no other class of LMDeploy's has. They are also asked as text models are.
ALSO_TEXT = {name: VISION[name] for name in ("qwen3_5", "qwen3_5_moe", "llama4", "kimi_k25")}

_GLM_NAMES = ("image_start", "image_end", "image", "video_start", "video_end", "video")
VISION["glm4v"] = VisionFamily(
    "Glm4v",
    "a table of positions resampled for each image; rotary on half of each head, in pairs, with three axes",
    {
        **{f"{name}_token_id": VOCAB_SIZE + place for place, name in enumerate(_GLM_NAMES)},
        "tie_word_embeddings": False,
        # Its tokens of beginning and end stand in generation_config.json alone.
        "text_config": {name: value for name, value in _TEXT.items() if not name.endswith("token_id")}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": _QWEN_VISION
        | {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "image_size": 32,
            "attention_bias": False,
        },
    },
    [
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|video|>",
    ],
    "<|begin_of_image|><|image|><|end_of_image|>",
    {
        "preprocessor_config.json": {
            "image_processor_type": "Glm4vImageProcessor",
            "processor_class": "Glm4vProcessor",
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": MERGE,
            "size": {"shortest_edge": 8 * (PATCH * MERGE) ** 2, "longest_edge": 128 * (PATCH * MERGE) ** 2},
            **_MEAN_AND_STD,
        }
    },
)


def _with_mean_and_std(family: VisionFamily, mean: list[float], std: list[float]) -> VisionFamily:
    config = family.files["preprocessor_config.json"] | {"image_mean": mean, "image_std": std}
    return replace(family, files=family.files | {"preprocessor_config.json": config})


VISION["internvl_chat"] = replace(
    _with_mean_and_std(VISION["internvl"], [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    exercises="remote-code config; images cut into tiles by LMDeploy itself",
    chat="Qwen2ForCausalLM",
)


def _with_llama(chat: str, exercises: str, text: dict[str, Any] | None = None, **vision: Any) -> VisionFamily:
    family = VISION["internvl_chat"]
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    parts = {
        "text_config": _TEXT | llama | (text or {}),
        "vision_config": family.config["vision_config"] | vision,
    }
    return replace(family, config=family.config | parts, chat=chat, exercises=exercises)


VISION["internvl_chat_llama"] = _with_llama(
    "LlamaForCausalLM",
    "the same around a Llama, with the norms of the large vision model",
    norm_type="rms_norm",
    use_qk_norm=True,
    attention_bias=False,
)
VISION["internvl_chat_internlm2"] = _with_llama(
    "InternLM2ForCausalLM",
    "the same around an InternLM2: q, k and v packed; dynamic NTK scaling",
    {
        name: POSITIONAL["llama_dynamic"].config[name]
        for name in ("rope_parameters", "max_position_embeddings")
    },
)


@dataclass(frozen=True)
class Elsewhere:
    """A family that has no class in transformers; its oracle is ``examples/..._reference.py``.

    text: the family that its language model is, where that has one.
    """

    exercises: str
    text: str = ""


VISION_ELSEWHERE = {
    "cogvlm": Elsewhere("every layer has weights of its own for images, whose pieces share one position"),
    "cogvlm2": Elsewhere("the same with grouped heads, fewer pieces, and frequencies of another base"),
    "glm_4v": Elsewhere("ChatGLM behind the same encoder, whose features are scaled", text="chatglm"),
}
