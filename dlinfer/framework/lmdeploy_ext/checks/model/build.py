"""Checks a model's memory and adapters, after LMDeploy has built its layers and before it loads the weights."""

from pathlib import Path
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.checks.model import adapters, weights
from dlinfer.framework.lmdeploy_ext.conversion.plan import packs_head, packs_if_faster, packs_in_place
from dlinfer.framework.lmdeploy_ext.device import activation, weight_memory
from dlinfer.framework.lmdeploy_ext.gguf.folder import GGUF_FILE
from dlinfer.framework.patching import Original, replaces

_LARGE = 256 << 20  # bytes


@replaces(
    "lmdeploy.pytorch.models.patch:build_patched_model",
    why="builds every layer in the checkpoint's format, and checks neither its memory nor its adapters; "
    "DLINFER_CPU_HEAD, DLINFER_CPU_WEIGHTS and GGUF files need packed layers",
    when=activation.is_on,
)
def build_patched_model(
    original: Original, config: Any, device: torch.device | None = None, build_model_ctx: Any = None
) -> Any:
    tied = bool(config.tie_word_embeddings)

    def make() -> Any:
        model = original(config, device, build_model_ctx)
        _keep_padding_rows(model)
        if packs_head(config.hf_config):
            from dlinfer.framework.lmdeploy_ext.layers.quantised import head  # imports LMDeploy's layers

            head.pack(model, tied)
        if bits := packs_in_place(config.hf_config):
            _pack(model, tied, config.dtype, bits)
        elif packs_if_faster(config.hf_config) and _is_faster_in_bf12(model, config, build_model_ctx):
            _pack(model, tied, config.dtype, "bf12")
        if hasattr(config.hf_config, GGUF_FILE):
            from dlinfer.framework.lmdeploy_ext.layers.quantised import gguf_packing  # likewise

            gguf_packing.prepare(model, tied, config.dtype, Path(getattr(config.hf_config, GGUF_FILE)))
        return model

    model = weight_memory.checked(make, tied)
    adapters.check_asked(model)
    weights.note_copy(model, original, config, build_model_ctx)
    return model


def _pack(model: Any, tied: bool, dtype: torch.dtype, bits: str) -> None:
    """Let a model pack its weights while they load. bits: the value of DLINFER_CPU_WEIGHTS."""
    from dlinfer.framework.lmdeploy_ext.layers.quantised import bf12, few_bits, packing  # LMDeploy's layers

    form: Any = bf12.BF12 if bits == bf12.BF12.bits else few_bits.FORMS[bits]
    packing.prepare(model, tied, dtype, form())


def _is_faster_in_bf12(model: torch.nn.Module, config: Any, context: Any) -> bool:
    """Return whether the device decodes faster if the weights are packed in 12 bits.

    Small models stay as they are, because caches may hold them. So do the ranks of tensor parallelism, which would
    measure beside each other. config: a ModelConfig. context: a BuildModelContext.
    """
    weights = list(model.parameters())
    is_large = sum(weight.nbytes for weight in weights) >= _LARGE
    is_planned = any(weight.is_meta for weight in weights)  # by preflight
    if not is_large or is_planned or config.dtype is not torch.bfloat16 or config.dist_config.world_size > 1:
        return False
    return activation.device().is_faster_with_bf12(max(context.max_batch_size, 1))


def _keep_padding_rows(model: torch.nn.Module) -> None:
    """Prevent LMDeploy from zeroing the padding token's embedding row while weights load. transformers keeps that row.

    The row matters if the output projection is tied to the embedding, or if a prompt contains the padding token. The
    padding token may also be the EOS token.
    """
    from lmdeploy.pytorch.nn.embedding import ParallelEmbedding

    for module in model.modules():
        if isinstance(module, ParallelEmbedding):
            module.padding_idx = None  # pyright: ignore[reportAttributeAccessIssue]
