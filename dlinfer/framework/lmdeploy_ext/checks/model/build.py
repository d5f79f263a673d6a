"""Checks a model's memory and adapters, after LMDeploy has built its layers and before it loads the weights."""

from pathlib import Path
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.checks.model import adapters, weights
from dlinfer.framework.lmdeploy_ext.conversion.plan import packs_bf12, packs_head
from dlinfer.framework.lmdeploy_ext.device import activation, weight_memory
from dlinfer.framework.lmdeploy_ext.gguf.folder import GGUF_FILE
from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.models.patch:build_patched_model",
    why="builds every layer in the checkpoint's format, and checks neither its memory nor its adapters; "
    "DLINFER_CPU_HEAD, DLINFER_CPU_WEIGHTS=bf12 and GGUF files need packed layers",
    when=activation.is_on,
)
def build_patched_model(
    original: Original, config: Any, device: torch.device | None = None, build_model_ctx: Any = None
) -> Any:
    tied = bool(config.tie_word_embeddings)

    def make() -> Any:
        model = original(config, device, build_model_ctx)
        _keep_padding_rows(model)
        if packs_head(getattr(config.hf_config, "quantization_config", None)):
            from dlinfer.framework.lmdeploy_ext.layers.quantised import head  # imports LMDeploy's layers

            head.pack(model, tied)
        if packs_bf12(config.hf_config):
            from dlinfer.framework.lmdeploy_ext.layers.quantised import bf12_packing  # likewise

            bf12_packing.prepare(model, tied, config.dtype)
        if hasattr(config.hf_config, GGUF_FILE):
            from dlinfer.framework.lmdeploy_ext.layers.quantised import gguf_packing  # likewise

            gguf_packing.prepare(model, tied, config.dtype, Path(getattr(config.hf_config, GGUF_FILE)))
        return model

    model = weight_memory.checked(make, tied)
    adapters.check_asked(model)
    weights.note_copy(model, original, config, build_model_ctx)
    return model


def _keep_padding_rows(model: torch.nn.Module) -> None:
    """Prevent LMDeploy from zeroing the padding token's embedding row while weights load. transformers keeps that row.

    The row matters if the output projection is tied to the embedding, or if a prompt contains the padding token. The
    padding token may also be the EOS token.
    """
    from lmdeploy.pytorch.nn.embedding import ParallelEmbedding

    for module in model.modules():
        if isinstance(module, ParallelEmbedding):
            module.padding_idx = None  # pyright: ignore[reportAttributeAccessIssue]
