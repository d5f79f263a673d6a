"""What is looked at when LMDeploy has made a model's layers, and has not yet read a weight: memory, and adapters."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.checks.folder import adapter_checks, weight_checks
from dlinfer.framework.lmdeploy_ext.conversion.plan import packs_bf12, packs_head
from dlinfer.framework.lmdeploy_ext.device import activation, weight_memory
from dlinfer.framework.patching import Patch


def _build_patched_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_patched_model(
        config: Any, device: torch.device | None = None, build_model_ctx: Any = None
    ) -> Any:
        if activation.active() is None:
            return original(config, device, build_model_ctx)

        def make() -> Any:
            model = original(config, device, build_model_ctx)
            _keep_padding_rows(model)
            if packs_head(getattr(config.hf_config, "quantization_config", None)):
                from dlinfer.framework.lmdeploy_ext.layers.quantised import head  # it loads LMDeploy's layers

                head.pack(model, bool(config.tie_word_embeddings))
            if packs_bf12(config.hf_config):
                from dlinfer.framework.lmdeploy_ext.layers.quantised import bf12_packing  # likewise

                bf12_packing.prepare(model, bool(config.tie_word_embeddings), config.dtype)
            return model

        model = weight_memory.checked(make, bool(config.tie_word_embeddings))
        adapter_checks.check_asked(model)
        weight_checks.note_copy(model, original, config, build_model_ctx)
        return model

    return build_patched_model


def _keep_padding_rows(model: torch.nn.Module) -> None:
    """LMDeploy's embedding zeroes the row of the padding token as it loads, which transformers does not: the token may
    stand in a prompt, as where it is the end of a text, and a tied projection reads the row too."""
    from lmdeploy.pytorch.nn.embedding import ParallelEmbedding

    for one in model.modules():
        if isinstance(one, ParallelEmbedding):
            one.padding_idx = None  # pyright: ignore[reportAttributeAccessIssue]


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.models.patch:build_patched_model",
        why="the first that knows the model's layers, before weights are loaded; there DLINFER_CPU_HEAD packs the last "
        "and DLINFER_CPU_WEIGHTS=bf12 has all packed as they load",
        signature="(config, device=None, build_model_ctx=None)",
        build=_build_patched_model,
    ),
)
