"""Patches on LMDeploy's models with an indexer (DeepSeek-V3.2, GLM-5), for ``indexer.py`` and ``layers/attention.py``.

This file is imported before LMDeploy's modules, so it imports none of them at its top level.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.quantised import kv_quantisation
from dlinfer.framework.patching import Original, replaces

# --- the model's configuration

_MODELS = ("deepseek_v32", "glm_moe_dsa")

_replaces = functools.partial(replaces, when=activation.is_on, for_models=_MODELS)
_NO_CONTEXT = (
    "relies on the step's context for the indexer's cache, but a graph sees only the model's arguments"
)
_CHOSEN = (
    "keeps the chosen indices in a buffer that grows, which a graph for any number of tokens cannot capture"
)


@_replaces(
    "lmdeploy.pytorch.configurations.deepseek_v32:DeepseekV32ModelConfigBuilder.build",
    why="requires FlashMLA, which needs CUDA, and caches latents in bfloat16 whatever the model's dtype is",
)
def _build_config(original: Original, cls: Any, hf_config: Any, model_path: Any = None, **kwargs: Any) -> Any:
    """Build LMDeploy's configuration without FlashMLA, and with a KV cache of the model's dtype."""
    from lmdeploy.pytorch.configurations.deepseek_v2 import DeepseekV2ModelConfigBuilder

    if hf_config.model_type == "glm_moe_dsa":
        # transformers always rotates pairs. LMDeploy rotates halves if the configuration says nothing.
        if not getattr(hf_config, "indexer_rope_interleave", True):
            raise refuse(
                "GlmMoeDsaForCausalLM with indexer_rope_interleave=False",
                "use a model with indexer_rope_interleave=True",
            )
        hf_config.indexer_rope_interleave = True
    config = DeepseekV2ModelConfigBuilder.build(hf_config, model_path=model_path, **kwargs)
    config.mla_index_topk = hf_config.index_topk
    return config


@_replaces(
    "lmdeploy.pytorch.engine.executor:_finalize_sparse_mla_cache_policy",
    why="silently turns quant_policy=16 into CUDA's packed FP8 cache of latents",
)
def _cache_policy(original: Original, model_configs: Sequence[Any], cache_config: Any) -> None:
    for model_config in model_configs:
        kv_quantisation.check_model(model_config, cache_config)


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._get_dsa_score_workspace_size",
    why="reserves 512 MiB for scores, though the device's op computes them a few megabytes at a time",
    essential=False,
    for_models=_MODELS,
)
def _score_workspace(original: Original, self: Any) -> int:
    return 0 if activation.serves(self.device_type) else original(self)


# --- what the model builds


@_replaces(
    "lmdeploy.pytorch.models.deepseek_v32:DeepseekV32ForCausalLM.__init__",
    why="keeps the weights of RMS norms in float32, though transformers and the device's ops use the model's dtype",
)
def _model_init(
    original: Original, self: Any, config: Any, ctx_mgr: Any, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, ctx_mgr, dtype, device)
    from lmdeploy.pytorch.nn import RMSNorm

    norms: list[Any] = [module for module in self.modules() if isinstance(module, RMSNorm)]
    for norm in norms:
        norm.weight.data = norm.weight.data.to(dtype)


def _indexer_init(
    original: Original,
    self: Any,
    config: Any,
    layer_idx: int,
    dtype: Any = None,
    device: Any = None,
    **kwargs: Any,
) -> None:
    original(self, config, layer_idx, dtype, device, **kwargs)
    self.indexer_topk.index_impl.dtype = dtype
    if self.use_fusion and dtype is not torch.bfloat16:
        from lmdeploy.pytorch.nn.linear import build_colwise_linear

        rows, own = self.head_dim + self.n_heads, {"dtype": dtype, "device": device}
        self.wk_weights_proj = build_colwise_linear(self.dim, rows, bias=False, is_tp=False, **own)


@_replaces(
    "lmdeploy.pytorch.models.deepseek_v32:rotate_activation",
    why="requires bfloat16 and a CUDA package, for a rotation that matters only to FP8 rounding",
)
def _rotate_activation(original: Original, x: Tensor) -> Tensor:
    return x


@_replaces(
    "lmdeploy.pytorch.models.glm_moe_dsa:GlmMoeDsaIndexer._apply_rotary_pos_emb",
    why="halves the rotary tables, but LMDeploy's own dlinfer layer needs whole tables",
)
def _rotate_glm(
    original: Original, self: Any, q_pe: Tensor, k_pe: Tensor, freqs_cis: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return rotated q [1, N, heads, R] and k [1, N, 1, R]. k_pe: [1, N, R]. freqs_cis: cos and sin, [N, R]."""
    from dlinfer.framework.lmdeploy_ext.layers.sparse_attention.indexer import rotated

    heads = (q_pe[0], k_pe[0, :, None])
    q, k = (rotated(x.float(), *freqs_cis, self.rope_interleave).to(x.dtype)[None] for x in heads)
    return q, k


# --- the indexer's cache: an argument of the model, since a graph sees only its arguments


@_replaces(
    "lmdeploy.pytorch.models.deepseek_v32:DeepseekV32ForCausalLM.prepare_inputs_for_generation",
    why=_NO_CONTEXT,
)
def _inputs(
    original: Original, self: Any, past_key_values: Any, inputs_embeds: Any = None, context: Any = None
) -> Any:
    past_key_values = _with_indexers(self, past_key_values, context.block_caches)
    return original(self, past_key_values, inputs_embeds, context)


def _with_indexers(model: Any, layers: Sequence[Any], view: Any) -> Sequence[Any]:
    """Return the caches of each layer, with the indexer's cache in place of the cache of values, which is empty.

    view: LMDeploy's view of the caches, which lives as long as the caches. The returned list is stored in ``view``, and
    later calls return the same list. Graphs recognise bound caches by the identity of this list.
    """
    if getattr(view, "dlinfer_layers", None) is None:
        indexers = [layer.self_attn.indexer for layer in model.model.layers]
        view.dlinfer_layers = [
            (keys, values if indexer is None else _row(view, indexer))
            for indexer, (keys, values) in zip(indexers, layers, strict=True)
        ]
    return view.dlinfer_layers


def _row(view: Any, indexer: Any) -> Tensor:
    binding = indexer.indexer_topk._block_cache_binding
    return view.row(binding.cache_name, binding.consumer_row)


def _attention_forward(original: Original, self: Any, **kwargs: Any) -> Tensor:
    """Run a layer's attention. During the call, its indexer has the indexer's cache as an attribute.

    kwargs: all arguments, by name.
    """
    if self.indexer is None:
        return original(self, **kwargs)
    self.indexer.indexer_topk.dlinfer_cache = kwargs["past_key_value"][1]
    result = original(self, **kwargs)
    # Otherwise the cache's memory would not be freed while LMDeploy sleeps.
    self.indexer.indexer_topk.dlinfer_cache = None
    return result


@_replaces("lmdeploy.pytorch.nn.nsa:IndexerTopKFP8._get_block_cache", why=_NO_CONTEXT)
def _block_cache(original: Original, self: Any) -> Tensor:
    return self.dlinfer_cache


# --- GLM-5: layers that reuse the previous indexer's choice


@_replaces("lmdeploy.pytorch.models.glm_moe_dsa:DSATopKIndicesBuffer.write", why=_CHOSEN)
def _write_indices(original: Original, self: Any, topk_indices: Tensor | None) -> Tensor | None:
    self.dlinfer_chosen = topk_indices
    return topk_indices


@_replaces("lmdeploy.pytorch.models.glm_moe_dsa:DSATopKIndicesBuffer.read", why=_CHOSEN)
def _read_indices(original: Original, self: Any, num_tokens: int, device: torch.device) -> Tensor | None:
    return self.dlinfer_chosen


@replaces(
    "lmdeploy.pytorch.models.glm_moe_dsa:GlmMoeDsaModel.forward",
    why=_CHOSEN,
    when=activation.is_on,
    signature="(self, input_ids=None, position_ids=None, past_key_values=None, attn_metadata=None, "
    "inputs_embeds=None, all_routed_experts=None)",
    for_models=_MODELS,
)
def _glm_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    result = original(self, *args, **kwargs)
    self.topk_indices_buffer.dlinfer_chosen = None
    return result


_JOINT = "builds the joint projection in bfloat16 whatever the dtype of the model is, and does not pass on that dtype"
_INIT = "self, config, layer_idx, dtype=None, device=None"
_FORWARD = "self, hidden_states, rotary_pos_emb, past_key_value=None, attn_metadata=None"

PATCHES = tuple(
    _replaces(f"lmdeploy.pytorch.models.{target}", why=why, signature=f"({signature})")(replace)
    for target, why, signature, replace in (
        ("deepseek_v32:Indexer.__init__", _JOINT, _INIT, _indexer_init),
        ("glm_moe_dsa:GlmMoeDsaIndexer.__init__", _JOINT, f"{_INIT}, prefix=''", _indexer_init),
        ("deepseek_v32:DeepseekV32Attention.forward", _NO_CONTEXT, _FORWARD, _attention_forward),
        (
            "glm_moe_dsa:GlmMoeDsaAttention.forward",
            _NO_CONTEXT,
            f"{_FORWARD}, topk_indices_buffer=None, skip_topk=False",
            _attention_forward,
        ),
    )
)
