"""Load a model from a Hugging Face folder, or report why its layers cannot be compiled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import ModelFolderError, UnsupportedFeatureError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of decoders whose layers take hidden states, a mask, a KV cache and rotary tables."""

FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose tables do not depend on the current length of a sequence."""


def load(folder: Path, seq_length: int) -> Any:
    """Return the model in eval mode, with eager attention.

    seq_length: the number of tokens that the compiled model is for.
    Raises ModelFolderError if the folder cannot be read.
    Raises UnsupportedFeatureError if the model cannot be compiled.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise _wrong(folder, "it has no config.json")
    for feature, advice in _unsupported(_read(AutoConfig, folder), seq_length):
        raise UnsupportedFeatureError(feature=feature, where="dlinfer compile --engine sophgo", advice=advice)
    safe = {"use_safetensors": True}  # the other format is a pickle
    model = _read(AutoModelForCausalLM, folder, **safe, dtype="auto", attn_implementation="eager")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise _wrong(folder, "some weights are missing from its files")
    return model.eval().requires_grad_(False)


def _read(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a folder by a class of transformers. Nothing is downloaded, and no code of the folder runs.

    kind: the class, such as AutoConfig. Raises ModelFolderError.
    """
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as cause:  # transformers raises many classes; the user needs the reason
        first_line = (str(cause).strip().splitlines() or [""])[0]
        raise _wrong(folder, f"{type(cause).__name__}: {first_line}") from cause


def _unsupported(config: Any, seq_length: int) -> Iterator[tuple[str, str]]:
    """Yield a pair for each feature that prevents compiling the model: the feature, and advice."""
    if config.model_type not in MODEL_TYPES:
        yield f"model_type {config.model_type!r}", f"use one of {', '.join(MODEL_TYPES)}"
    method = getattr(config, "quantization_config", None)
    if method is not None:
        method = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
        yield (
            f"weights quantised by {method}",
            "use the floating-point model, and quantise it with --quantize",
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in FIXED_ROPES:
        yield f"rope_type {kind!r}", f"use a model with one of {', '.join(FIXED_ROPES)}"
    most, shorter = config.max_position_embeddings, "choose a smaller --seq-length"
    if seq_length > most:
        yield f"a sequence of {seq_length} tokens with a model of at most {most}", shorter
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    windowed = kinds != {"full_attention"} or (config.model_type == "mistral" and window is not None)
    if windowed and (window is None or seq_length > window):
        yield f"attention with a window of {window} over {seq_length} tokens", shorter


def rotary_tables(model: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the model's own rotary embedding for ``length`` positions, float32 [length, head_size]."""
    positions = torch.arange(length)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
    return cos[0].float(), sin[0].float()


def _wrong(folder: Path, detail: str) -> ModelFolderError:
    advice = "pass the folder that save_pretrained wrote, with config.json and the weights"
    return ModelFolderError(path=str(folder), detail=detail, advice=advice)
