"""A Hugging Face folder as a model whose layers can be compiled, or the reason why they cannot."""

from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import ModelFolderError, UnsupportedFeatureError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders of layers that take hidden states, a mask, a KV cache and rotary tables."""

FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose tables do not depend on how long a sequence has become."""


def load(folder: Path, seq_length: int) -> Any:
    """Return the model, in eval mode, with attention written out in plain ops.

    Raises ModelFolderError and UnsupportedFeatureError.
    """
    config = _config(folder)
    _refuse(config, seq_length)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # the other format is a pickle
            dtype="auto",
            attn_implementation="eager",
        )
    except Exception as cause:  # whatever transformers raises, the reason is what the user needs
        raise _wrong(folder, f"{type(cause).__name__}: {_first_line(cause)}") from cause
    if any(parameter.is_meta for parameter in model.parameters()):
        raise _wrong(folder, "some weights are in no file of it")
    return model.eval().requires_grad_(False)


def _config(folder: Path) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as cause:
        raise ModelFolderError(
            path=str(folder),
            detail="transformers is not installed",
            advice="pip install 'dlinfer[sophgo]', which has transformers",
        ) from cause
    if not (folder / "config.json").is_file():
        raise _wrong(folder, "it has no config.json")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as cause:
        raise _wrong(folder, f"{type(cause).__name__}: {_first_line(cause)}") from cause


def _refuse(config: Any, seq_length: int) -> None:
    if config.model_type not in MODEL_TYPES:
        raise _unsupported(f"model_type {config.model_type!r}", f"models that are: {', '.join(MODEL_TYPES)}")
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = (
            quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else quantised
        )
        raise _unsupported(
            f"weights quantised by {method}", "give the model in floats; --quantize makes fewer bits"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in FIXED_ROPES:
        raise _unsupported(f"rope_type {kind!r}", f"rotary embeddings that are: {', '.join(FIXED_ROPES)}")
    if seq_length > config.max_position_embeddings:
        raise _unsupported(
            f"a sequence of {seq_length} tokens with a model for {config.max_position_embeddings}",
            "choose a smaller --seq-length",
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    windowed = kinds != {"full_attention"} or (config.model_type == "mistral" and window is not None)
    if windowed and (window is None or seq_length > window):
        raise _unsupported(
            f"attention with a window of {window} over {seq_length} tokens", "choose a smaller --seq-length"
        )


def rotary_tables(model: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the model's own rotary embedding, [length, head_size] float32 each."""
    positions = torch.arange(length)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
    return cos[0].float(), sin[0].float()


def _wrong(folder: Path, detail: str) -> ModelFolderError:
    advice = "give the folder that save_pretrained wrote, with config.json and the weights"
    return ModelFolderError(path=str(folder), detail=detail, advice=advice)


def _unsupported(feature: str, advice: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature=feature, where="dlinfer compile --engine sophgo", advice=advice)


def _first_line(cause: BaseException) -> str:
    return (str(cause).strip().splitlines() or [""])[0]
