"""Writes tiny models as GGUF files with gguf's own writer, and gives transformers' model the numbers that gguf reads.

Names come from gguf's own table, and blocks are quantised by gguf where it can. It has no quantiser for the types with
blocks of 256: theirs are random bytes with scales that suit a model, which any bytes of a block can be.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from examples.tiny_models import tokenizer
from examples.tiny_models.families import COMMON, MOE, STOP_IDS

QUANTISED_BY_GGUF = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)
K_TYPES = (Type.Q4_K, Type.Q5_K, Type.Q6_K)

SIZES: dict[str, Any] = COMMON | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,
}
_GEMMA = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_WINDOW = {"sliding_window": 16, "query_pre_attn_scalar": 32}
_EXPERTS = MOE | {"num_experts": 4, "moe_intermediate_size": 256, "decoder_sparse_step": 1}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama3": ("llama", "Llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}, "max_position_embeddings": 16384}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 64}),
    "qwen2_moe": ("qwen2moe", "Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 256, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3moe", "Qwen3Moe", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "gemma": ("gemma", "Gemma", _GEMMA | {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", "Gemma2", _GEMMA | _WINDOW),
    "gemma3": ("gemma3", "Gemma3", _GEMMA | _WINDOW | {"num_hidden_layers": 7, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
}  # fmt: skip
"""Family -> gguf's name of its architecture, the start of transformers' class, and fields of its configuration."""

Choose = Callable[[str], Type]
"""A function from gguf's name of a matrix to the type that it is stored in."""


def make_model(family: str, seed: int = 0, **more: Any) -> Any:
    """Return transformers' model of a family, random, in float32. more: fields of its configuration that differ."""
    _, start, fields = FAMILIES[family]
    model_class = getattr(transformers, f"{start}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**SIZES | fields | more)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn_like(parameter) * 0.2
                parameter.copy_(noise if name.endswith("bias") or "gemma" in family else 1 + noise)
    model.generation_config.eos_token_id = STOP_IDS
    return model


# --- blocks


def stored(weight: np.ndarray, kind: Type, rng: np.random.Generator) -> np.ndarray:
    """Return a matrix in blocks, uint8 [..., bytes of a row]. Blocks of K_TYPES are random, of the weight's size."""
    if kind is Type.BF16:
        return torch.from_numpy(weight).bfloat16().view(torch.uint8).numpy()
    if kind not in K_TYPES:
        return np.ascontiguousarray(gguf.quantize(weight, kind)).view(np.uint8)
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    count = weight.size // numbers
    blocks = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    size = float(weight.std())

    def put(at: int, scale: np.ndarray) -> None:
        blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)

    factor = size * rng.uniform(0.5, 1.0, count)
    if kind is Type.Q6_K:
        put(208, factor / 1000)
    else:
        levels = 15 if kind is Type.Q4_K else 31
        put(0, factor / 31 / levels * 2)
        put(2, factor / 31)
    return blocks.reshape(*weight.shape[:-1], -1)


def values(blocks: np.ndarray, kind: Type) -> np.ndarray:
    """Return the float32 numbers that gguf reads in blocks."""
    if kind is Type.BF16:
        return torch.from_numpy(blocks).view(torch.bfloat16).float().numpy()
    if kind in (Type.F32, Type.F16):
        return blocks.view(np.float32 if kind is Type.F32 else np.float16).astype(np.float32)
    return gguf.dequantize(blocks, kind)


# --- tensors


def _paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from halves of heads to neighbours, as llama.cpp stores q and k of Llama."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _unpaired(weight: np.ndarray, heads: int) -> np.ndarray:
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _parts(model: Any, arch: str) -> list[tuple[str, torch.Tensor, int, bool]]:
    """Return (gguf's name, the model's tensor, heads to pair or 0, whether one is added) of all stored tensors."""
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    parts = []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        path, _, suffix = name.rpartition(".")
        if suffix in ("gate_up_proj", "down_proj"):  # of experts
            layer = path.split(".")[2]
            inner = tensor.shape[1] // 2
            if suffix == "down_proj":
                parts.append((f"blk.{layer}.ffn_down_exps.weight", tensor, 0, False))
            else:
                parts.append((f"blk.{layer}.ffn_gate_exps.weight", tensor[:, :inner], 0, False))
                parts.append((f"blk.{layer}.ffn_up_exps.weight", tensor[:, inner:], 0, False))
            continue
        target = table.get_name(path)
        if target is None and path.endswith("mlp.gate"):
            target = f"blk.{path.split('.')[2]}.ffn_gate_inp"
        assert target is not None, name
        heads = 0
        if arch == "llama" and target.endswith(("attn_q", "attn_k")):
            heads = config.num_attention_heads if target.endswith("q") else config.num_key_value_heads
        plus_one = arch.startswith("gemma") and path.endswith("norm")
        parts.append((f"{target}.{suffix}", tensor, heads, plus_one))
    return parts


def write(
    family: str, model: Any, tokens: Any, path: Path, choose: Choose, seed: int = 0, **metadata: Any
) -> None:
    """Write a model and a tokenizer to a GGUF file, and give the model the numbers that gguf reads in it.

    choose: the types of matrices; vectors and routers are float32, as in llama.cpp. metadata: values to add.
    """
    arch = FAMILIES[family][0]
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    add_config(writer, family, model.config)
    if tokens is not None:
        add_tokenizer(writer, tokens)
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    for name, tensor, heads, plus_one in _parts(model, arch):
        array = tensor.float().numpy().copy()
        array = _paired(array, heads) if heads else array
        if "shared_expert_gate" in name or name.endswith("ffn_gate_inp_shexp.weight"):
            array = array.reshape(-1)
        is_plain = array.ndim == 1 or "ffn_gate_inp" in name
        kind = Type.F32 if is_plain else choose(name)
        if plus_one:
            array = array + np.float32(1)
        blocks = stored(array, kind, rng)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        again = values(blocks, kind)
        again = again - np.float32(1) if plus_one else again
        again = _unpaired(again, heads) if heads else again
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(again.reshape(tensor.shape).copy()))
    if family == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _divisors(model: Any) -> np.ndarray:
    """Return each frequency's divisor in Llama 3.1: transformers' plain frequency by its scaled one."""
    config = model.config
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = config.hidden_size // config.num_attention_heads
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2).double() / size)
    return (plain / scaled.double()).float().numpy()


# --- metadata


def add_config(writer: Any, family: str, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if family in ("qwen3", "qwen3_moe") or "gemma" in family:
        writer.add_key_length(size)
        writer.add_value_length(size)
    if family in ("llama", "llama3", "mixtral"):
        writer.add_rope_dimension_count(size)
        writer.add_vocab_size(config.vocab_size)
    if family == "gemma3":
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
    elif "gemma" not in family:
        writer.add_rope_freq_base(rope["rope_theta"])
    if family in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_tokenizer(writer: Any, tokens: Any) -> None:
    """Add a byte-level tokenizer that splits texts by GPT-2's rule, such as that of ``examples.tiny_models``."""
    backend = json.loads(tokens.backend_tokenizer.to_str())
    vocabulary = tokens.get_vocab()
    special = {token["content"] for token in backend["added_tokens"] if token["special"]}
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if text in special else normal for text in texts])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(tokens.bos_token_id)
    writer.add_eos_token_id(tokens.eos_token_id)
    writer.add_unk_token_id(tokens.unk_token_id)
    writer.add_pad_token_id(tokens.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokens.chat_template)


def build(family: str, path: Path, choose: Choose, seed: int = 0, **more: Any) -> Any:
    """Write a tiny model of a family to a GGUF file, and return transformers' model with the same numbers."""
    model = make_model(family, seed, **more)
    write(family, model, tokenizer.train(), path, choose, seed)
    return model


def of_type(kind: Type) -> Choose:
    """Return a choice of one type for all matrices."""
    return lambda name: kind


def mixed(name: str) -> Type:
    """Choose types as llama.cpp's Q4_K_M does: joined layers, such as q, k and v, have several."""
    if name in ("token_embd.weight", "output.weight") or "ffn_down" in name or "attn_v" in name:
        return Type.Q6_K
    return Type.Q5_K if "attn_k" in name else Type.Q4_K
