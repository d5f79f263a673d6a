"""Writes a model's config.json and generation_config.json from the metadata of a GGUF file.

transformers has such a mapping too. It lacks the head size of Qwen3, the sizes of experts, Mixtral, the rope scaling of
Llama 3.1, the rope of Gemma 3's local layers, and the names of the classes. These families need all of them. A key of
the architecture's metadata that is not read here may change what the model computes, so such a file is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlinfer.framework.lmdeploy_ext.gguf.reader import Entry, Header, unusable

FAMILIES = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma", "gemma2", "gemma3")
"""Names of architectures that are served. Files of Mistral and Mixtral name llama too."""

_GEMMA = ("gemma", "gemma2", "gemma3")

_UNREAD = frozenset(
    "vocab_size expert_feed_forward_length expert_shared_feed_forward_length rope.scaling.finetuned "
    "attention.value_length".split()
)
"""Keys that repeat what tensors' sizes say, or that change nothing."""

_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
"""GGUF's number of a floating-point type -> its name in config.json."""

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
"""Control tokens that end an answer. llama.cpp finds them by these texts too, as files name only one such token."""

_CONTROL, _USER_DEFINED = 3, 4


class _Metadata:
    """The metadata of one architecture. Raises ModelFolderError for keys that are missing, and for keys not read."""

    def __init__(self, header: Header) -> None:
        self.header = header
        start = f"{header.architecture}."
        self._values = {
            key.removeprefix(start): value for key, value in header.metadata.items() if key.startswith(start)
        }
        self._read: set[str] = set(_UNREAD)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._values.get(key, default)
        if isinstance(value, list):
            if any(item != value[0] for item in value):
                raise unusable(
                    self.header.path, f"{key} differs between layers: {value}", "use another model"
                )
            value = value[0]
        return value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            detail = f"its metadata lacks {self.header.architecture}.{key}"
            raise unusable(self.header.path, detail, "convert the model again with a current llama.cpp")
        return value

    def rows(self, tensor: str) -> int:
        """Return the number of rows of a tensor that every file has."""
        return self.entry(tensor).shape[-2]

    def entry(self, tensor: str) -> Entry:
        entry = self.header.tensors.get(tensor)
        if entry is None or len(entry.shape) < 2:
            raise unusable(self.header.path, f"it has no matrix {tensor}")
        return entry

    def check_read(self) -> None:
        if unread := sorted(self._values.keys() - self._read):
            detail = f"dlinfer does not know the key {self.header.architecture}.{unread[0]} of its metadata"
            raise unusable(self.header.path, detail, "use the model in the format of Hugging Face")


def config_of(header: Header) -> dict[str, Any]:
    """Return the contents of config.json. Raises ModelFolderError for an architecture or a key that is not served."""
    name = header.architecture
    if name not in FAMILIES:
        detail = f"GGUF files of architecture {name!r} are not served, only of {', '.join(FAMILIES)}"
        raise unusable(header.path, detail, "use the model in the format of Hugging Face")
    metadata = _Metadata(header)
    hidden, heads = metadata["embedding_length"], metadata["attention.head_count"]
    head_size = metadata.get("attention.key_length") or hidden // heads
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": metadata["feed_forward_length"],
        "num_hidden_layers": metadata["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": head_size,
        "rms_norm_eps": metadata["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": metadata["context_length"],
        "vocab_size": metadata.rows("token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(metadata, head_size),
        "dtype": _dtype(header),
        **{f"{kind}_token_id": number for kind, number in _special(header).items()},
    }
    config |= _own(metadata, config)
    metadata.check_read()
    return config


def _own(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that one family has. config: the fields of all families."""
    name, biased = metadata.header.architecture, "blk.0.attn_q.bias" in metadata.header.tensors
    if name == "llama" and metadata.get("expert_count", 0):
        chosen = {"num_local_experts": metadata["expert_count"], "sliding_window": None}
        return _of(
            "mixtral", "MixtralForCausalLM", **chosen, **_experts(metadata, "softmax and renormalised")
        )
    if name == "llama":
        metadata.get("expert_used_count")
        return _of("llama", "LlamaForCausalLM", attention_bias=biased, mlp_bias=False)
    if name == "qwen2":
        return _of("qwen2", "Qwen2ForCausalLM", use_sliding_window=False)
    if name == "qwen3":
        return _of("qwen3", "Qwen3ForCausalLM", use_sliding_window=False, attention_bias=biased)
    if name in ("qwen2moe", "qwen3moe"):
        of_qwen2 = name == "qwen2moe"
        fields = {
            "num_experts": metadata["expert_count"],
            "moe_intermediate_size": metadata.rows("blk.0.ffn_gate_exps.weight"),
            "norm_topk_prob": not of_qwen2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            **_experts(metadata, "softmax"),
        }
        if of_qwen2:
            shared = metadata.rows("blk.0.ffn_gate_shexp.weight")
            return _of(
                "qwen2_moe",
                "Qwen2MoeForCausalLM",
                **fields,
                shared_expert_intermediate_size=shared,
                qkv_bias=biased,
            )
        return _of("qwen3_moe", "Qwen3MoeForCausalLM", **fields, attention_bias=biased)
    return _gemma(metadata, config)


def _of(model_type: str, model_class: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [model_class], **fields}


def _experts(metadata: _Metadata, routing: str) -> dict[str, Any]:
    """Return the field for the number of chosen experts. Refuses a routing that the family's class does not have."""
    softmax = metadata.get("expert_gating_func", 1) == 1
    if not softmax or metadata.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise unusable(metadata.header.path, f"its experts are not chosen by {routing}", "use another model")
    metadata.get("expert_weights_norm")
    return {"num_experts_per_tok": metadata["expert_used_count"]}


def _gemma(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    name, layers = metadata.header.architecture, config["num_hidden_layers"]
    common = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    if name == "gemma":
        return _of("gemma", "GemmaForCausalLM", **common, hidden_act="gelu_pytorch_tanh")
    # The files lack the scale of scores. llama.cpp too knows the models with 27 billion weights by their layers.
    is_27b = layers == {"gemma2": 46, "gemma3": 62}[name]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    common |= {
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "sliding_window": metadata["attention.sliding_window"],
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
    }
    if name == "gemma2":
        return _of("gemma2", "Gemma2ForCausalLM", **common)
    pattern = metadata.get("attention.sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    local = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 10000.0)}
    rope = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return _of("gemma3_text", "Gemma3ForCausalLM", **common, layer_types=kinds, rope_parameters=rope)


# --- rotary embedding


def _rope(metadata: _Metadata, head_size: int) -> dict[str, Any]:
    path = metadata.header.path
    theta = metadata.get("rope.freq_base", 10000.0)
    if metadata.get("rope.dimension_count", head_size) != head_size:
        raise unusable(path, "it rotates a part of each head only", "use another model")
    if "rope_freqs.weight" in metadata.header.tensors:
        return {"rope_theta": theta, **_llama3(metadata, head_size, theta)}
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.get("rope.scaling.factor")
    factor = metadata.get("rope.scale_linear") if factor is None else factor
    original = metadata.get("rope.scaling.original_context_length")
    if kind == "none" and factor in (None, 0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "none") and factor:
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn" and factor and original:
        scaled = {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
        return {"rope_type": "yarn", **scaled}
    raise unusable(path, f"its rope scaling {kind!r} is not served", "use another model")


def _llama3(metadata: _Metadata, head_size: int, theta: float) -> dict[str, Any]:
    """Return the rope parameters of Llama 3.1 and later, whose files store each frequency's divisor as a tensor.

    The largest divisor is the factor. All checkpoints have the other parameters below. Raises ModelFolderError if they
    do not give the stored divisors.
    """
    header, entry = metadata.header, metadata.header.tensors["rope_freqs.weight"]
    stored = np.memmap(header.path, np.float32, "r", entry.begin, (entry.nbytes // 4,))
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    turns = original / (2 * math.pi) * theta ** -(np.arange(0, head_size, 2) / head_size)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if (
        entry.type != 0
        or stored.shape != turns.shape
        or not np.allclose(stored, 1 / ((1 - share) / factor + share))
    ):
        raise unusable(header.path, "its tensor rope_freqs is not that of Llama 3.1", "use another model")
    scaling = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **scaling}


# --- tokens and dtype


def _dtype(header: Header) -> str:
    """Return the dtype of a file's floating-point matrices.

    It is bfloat16 if the file also has quantised matrices, because all these families were published in bfloat16.
    Gemma's activations exceed float16, so its models are served in bfloat16 instead.
    """
    kinds = {entry.type for entry in header.tensors.values() if len(entry.shape) > 1}
    dtype = _DTYPES.get(max(kinds, default=0), "bfloat16") if kinds <= _DTYPES.keys() else "bfloat16"
    return "bfloat16" if dtype == "float16" and header.architecture in _GEMMA else dtype


def _special(header: Header) -> dict[str, int]:
    """Return the ids of special tokens: a dict with some of bos, eos and pad."""
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {kind: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for kind, key in keys.items()}
    return {kind: number for kind, number in ids.items() if isinstance(number, int)}


def generation_config_of(header: Header) -> dict[str, Any]:
    """Return the contents of generation_config.json: special tokens, with all tokens that end an answer."""
    special, metadata = _special(header), header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    ends = {special[kind] for kind in ("eos",) if kind in special}
    named = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom"))
    ends |= {number for number in named if isinstance(number, int)}
    ends |= {
        number
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and text in _ENDS
    }
    config: dict[str, Any] = {f"{kind}_token_id": number for kind, number in special.items()}
    return config | ({"eos_token_id": sorted(ends)} if ends else {})
