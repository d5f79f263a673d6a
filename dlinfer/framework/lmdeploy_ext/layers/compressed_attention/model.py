"""Patches on LMDeploy's DeepSeek-V4, for the layers in ``layers.py``.

This file is imported before LMDeploy's modules, so it imports none of them at its top level.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.conversion.deepseek_v4 import MODEL, MXFP4
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.patching import Original, replaces

_MODULE = "lmdeploy.pytorch.models.deepseek_v4"
_replaces = functools.partial(replaces, when=activation.is_on, for_models=(MODEL,))

# --- the model's configuration

_STATES = {
    "v4_window_kv_fp8": "window",
    **{f"v4_compress_state_{kind}": "tokens" for kind in ("r4", "r4_idx", "r128")},
}
"""Name of one of LMDeploy's caches of states -> what it holds."""

_SERVED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": ("sqrtsoftplus", "sigmoid"),  # LMDeploy does not renormalise the weights of softmax
    "attention_bias": (False,),  # transformers has no biases
    "norm_topk_prob": (True,),
    "n_shared_experts": (1,),
}
"""Field of the configuration -> the served values. With other values LMDeploy and transformers differ."""


def check(model_config: Any) -> None:
    """Set the sizes and dtypes of the states of DeepSeek-V4, or raise UnsupportedFeatureError for its configuration.

    LMDeploy keeps the keys of a window in FP8, in FlashMLA's format for heads of 512 numbers. Here they have the
    model's dtype. model_config: LMDeploy's ModelConfig; models of other classes stay as they are.
    """
    config = model_config.hf_config
    if config.model_type != MODEL:
        return
    for name, served in _SERVED_FIELDS.items():
        value = getattr(config, name, served[0])
        if value not in served:
            raise refuse(f"{name}={value!r} of DeepSeek-V4", f"use a model with {name}={served[0]!r}")
    if not config.swiglu_limit > 0:
        raise refuse(
            f"swiglu_limit={config.swiglu_limit} of DeepSeek-V4", "use a model with a positive limit"
        )
    if set(config.layer_types) == {"sliding_attention"}:
        raise refuse("a DeepSeek-V4 without compressed layers", "use a model with compressed layers")
    rope = config.rope_parameters["compress"]
    if rope["rope_type"] != "yarn" or rope.get("attention_factor", 1.0) != 1.0:
        kind = f"rope_type={rope['rope_type']!r}, attention_factor={rope.get('attention_factor')!r}"
        raise refuse(
            f"compressed layers of DeepSeek-V4 with {kind}", "use a model with YaRN and the factor 1.0"
        )
    model_config.sliding_window = -1  # the window is a state, so LMDeploy must keep all blocks
    window = (config.sliding_window, model_config.head_dim)
    specs = []
    for spec in model_config.state_cache_specs:
        if _STATES[spec.name] == "window":
            specs.append(replace(spec, shape=window, dtype=model_config.dtype))
        else:
            rows, width = spec.shape
            specs.append(replace(spec, shape=(2, rows // 2, width)))
    model_config.state_cache_specs = specs
    model_config.states_shapes = [(tuple(spec.shape), spec.dtype) for spec in specs]


@_replaces(
    "lmdeploy.pytorch.configurations.deepseek_v4:get_v4_compress_ratios",
    why="raises an error without a next step for windows of other lengths",
    essential=False,
)
def _ratios(original: Original, hf_config: Any) -> list[int]:
    try:
        return original(hf_config)
    except ValueError as error:
        raise refuse(
            f"a DeepSeek-V4 with these layers ({error})", "use a model as DeepSeek releases it"
        ) from error


# --- what the model builds


@_replaces(
    f"{_MODULE}:DeepseekV4ForCausalLM.__init__",
    why="keeps the weights of RMS norms in float16 or float32, though the device's ops use the model's dtype, and "
    "does not tell the compressors this dtype, which their caches have",
)
def _model_init(
    original: Original, self: Any, config: Any, ctx_mgr: Any, dtype: Any = None, device: Any = None
) -> None:
    compress = config.rope_parameters["compress"]
    for name, usual in (("beta_fast", 32), ("beta_slow", 1)):  # transformers' defaults
        compress.setdefault(name, usual)
    original(self, config, ctx_mgr, dtype, device)
    from lmdeploy.pytorch.nn import RMSNorm, V4Compressor

    norms: list[Any] = [module for module in self.modules() if isinstance(module, RMSNorm)]
    compressors: list[Any] = [module for module in self.modules() if isinstance(module, V4Compressor)]
    for norm in norms:
        norm.weight.data = norm.weight.data.to(self.dtype)
    for compressor in compressors:
        compressor.impl.dtype = self.dtype


@dataclass(frozen=True)
class Limited:
    """The activation of DeepSeek-V4's experts: silu(min(gate, limit)) * clamp(up, -limit, limit).

    LMDeploy's layer of experts passes it to ``layers.moe.experts``.
    """

    swiglu_limit: float


@_replaces(
    f"{_MODULE}:MoE.__init__",
    why="builds experts in FP4, which its load fills with rounded numbers if the checkpoint has floats",
)
def _moe_init(
    original: Original, self: Any, config: Any, layer_id: int, args: Any, dtype: Any, device: Any
) -> None:
    from lmdeploy.pytorch.models.deepseek_v4 import Expert, Gate

    nn.Module.__init__(self)
    self.dim = args.dim
    self.gate = Gate(layer_id, args, device=device)
    place = {"dtype": dtype, "device": device}
    sizes = (args.dim, args.moe_inter_dim)
    if getattr(config, "experts_packed_as", None) == MXFP4:
        from dlinfer.framework.lmdeploy_ext.layers.moe.mxfp4_experts import limited_mxfp4_experts

        self.experts = limited_mxfp4_experts(*sizes, args.n_routed_experts, args.swiglu_limit, device)
    else:
        from lmdeploy.pytorch.nn.moe import build_fused_moe

        counts = (args.n_routed_experts, args.n_activated_experts)
        act: Any = Limited(args.swiglu_limit)
        self.experts = build_fused_moe(*sizes, *counts, act_func=act, **place)
    self.shared_experts = Expert(config, *sizes, swiglu_limit=args.swiglu_limit, **place)


_COMPILED = "is compiled by torch.compile for itself, which takes seconds and cannot be part of a graph"


@_replaces(f"{_MODULE}:_v4_swiglu_impl", why=_COMPILED)
def _swiglu(original: Original, intermediate: Tensor, swiglu_limit: float) -> Tensor:
    gate, up = intermediate.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return (nn.functional.silu(gate) * up).to(intermediate.dtype)


@_replaces("lmdeploy.pytorch.nn.norm:rms_scale", why=_COMPILED)
def _rms_scale(
    original: Original,
    a: Tensor,
    b: Tensor,
    dim: int = -1,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    use_fp32: bool = True,
) -> Tensor:
    dtype = b.dtype if out_dtype is None else out_dtype
    if use_fp32:
        a, b = a.float(), b.float()
    return (a * torch.rsqrt(b.square().mean(dim, keepdim=True) + eps)).to(dtype)


# --- the forward: all that it needs is in its arguments, since a graph sees only these


@_replaces(
    f"{_MODULE}:DeepseekV4ForCausalLM.prepare_inputs_for_generation",
    why="relies on the step's context for all caches, but a graph sees only the model's arguments",
)
def _inputs(
    original: Original, self: Any, past_key_values: Any, inputs_embeds: Any = None, context: Any = None
) -> Any:
    layers = _caches_of_layers(self, context.block_caches, context.named_state_caches)
    return original(self, layers, inputs_embeds, context)


def _caches_of_layers(model: Any, blocks: Any, states: Any) -> Sequence[Sequence[Tensor]]:
    """Return each layer's caches: the window; for a compressor its state and its entries; the same for an indexer.

    blocks, states: LMDeploy's views of the caches, which live as long as the caches. The list is stored in ``states``,
    and later calls return the same list. Graphs recognise bound caches by the identity of this list.
    """
    known = getattr(states, "dlinfer_layers", None)
    if known is None or known[0] is not blocks:
        layers = [list(_caches(layer.attn, blocks, states)) for layer in model.layers]
        states.dlinfer_layers = known = (blocks, layers)
    return known[1]


def _caches(attention: Any, blocks: Any, states: Any) -> Iterator[Tensor]:
    yield states.layer("v4_window_kv_fp8", attention.layer_id)
    indexer = attention.indexer
    for compressor in (attention.compressor, None if indexer is None else indexer.compressor):
        if compressor is not None:
            (binding,) = compressor.compressor_impl._block_cache_bindings.values()
            yield states.layer(compressor.state_cache_name, attention.layer_id)
            yield blocks.row(binding.cache_name, binding.consumer_row)


@_replaces(
    f"{_MODULE}:DeepseekV4ForCausalLM.forward",
    why="makes metadata for CUDA kernels, and returns the streams of hidden states instead of hidden states",
)
def _forward(
    original: Original,
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    past_key_values: Any = None,
    attn_metadata: Any = None,
    inputs_embeds: Tensor | None = None,
    state_ids: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Return the hidden states [1, N, hidden] after the last norm. past_key_values: of ``_caches_of_layers``."""
    hidden = self.embed(input_ids)
    half = self.args.rope_head_dim // 2

    def tables(emb: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = emb(hidden, positions)
        return cos[0, :, :half], sin[0, :, :half]

    plain, compressed = (
        tables(emb, position_ids) for emb in (self.rotary_emb_plain, self.rotary_emb_compress)
    )
    entries = {}
    for ratio in sorted({layer.attn.compress_ratio for layer in self.layers} - {0}):
        first = position_ids + 1 - ratio
        ends = first[0] % ratio == 0
        slots = torch.where(ends, attn_metadata.kv_start_indices // ratio, -1)
        entries[ratio] = (*tables(self.rotary_emb_compress, first.clamp(min=0)), slots)
    streams = hidden.unsqueeze(2).repeat(1, 1, self.args.hc_mult, 1)
    for layer, caches in zip(self.layers, past_key_values, strict=True):
        ratio = layer.attn.compress_ratio
        rotary = {"rotary_pos_emb": compressed if ratio else plain, "compress_pos_emb": entries.get(ratio)}
        streams = layer(streams, attn_metadata, None, None, input_ids, state_ids, caches, **rotary)
    return self.norm(self._hc_head(streams))


@_replaces(
    f"{_MODULE}:DeepseekV4ForCausalLM.get_logits",
    why="takes the streams of hidden states, but the forward on the device returns the hidden states after the norm",
)
def _logits(original: Original, self: Any, hidden_states: Tensor) -> Tensor:
    return self.head(hidden_states.to(self.head.weight.dtype))


@_replaces(
    f"{_MODULE}:Attention.forward",
    why="rotates views of tensors in place, and takes caches from the step's context",
)
def _attention(
    original: Original,
    self: Any,
    x: Tensor,
    v4_meta: Any,
    v4_indexer_meta: Any,
    v4_compressor_meta: Any,
    slot: Tensor,
    caches: Any,
    rotary_pos_emb: Any = None,
    compress_pos_emb: Any = None,
) -> Tensor:
    """Return the attention's result [1, N, hidden] for x [1, N, hidden].

    v4_meta: the step's StepMetadata; v4_indexer_meta and v4_compressor_meta are None. slot: [sequences], the slots of
    the sequences' states. caches: of ``_caches``. rotary_pos_emb: cos and sin, [N, R]. compress_pos_emb: cos and sin of
    the entries that end at the tokens, and the slots of these entries; None for a layer without entries.
    """
    from dlinfer.framework.lmdeploy_ext.layers.compressed_attention.layers import (
        partial_rotary,
        unweighted_norm,
    )

    latent = self.q_norm(self.wq_a(x))
    heads = self.wq_b(latent)[0].unflatten(-1, (self.n_local_heads, self.head_dim))
    query = partial_rotary(unweighted_norm(heads, self.eps), *rotary_pos_emb)
    kv = partial_rotary(self.kv_norm(self.wkv(x))[0, :, None], *rotary_pos_emb)[:, 0]
    window, *rest = caches
    entries = chosen = None
    if self.compressor is not None:
        entries = _compress(self.compressor, x, slot, rest[:2], v4_meta, compress_pos_emb)
    if self.indexer is not None:
        keys = _compress(self.indexer.compressor, x, slot, rest[2:], v4_meta, compress_pos_emb)
        chosen = _choose(self.indexer, x, latent, keys, v4_meta, rotary_pos_emb)
    cached = ((window, entries), slot, chosen)
    out = self.attn_fwd.impl.forward(query, kv, self.attn_sink, v4_meta, *cached)
    cos, sin = rotary_pos_emb
    grouped = partial_rotary(out, cos, -sin).unflatten(1, (self.n_local_groups, -1)).flatten(2)
    product = torch.bmm(grouped.transpose(0, 1), self.wo_a.weight).transpose(0, 1)
    return self.wo_b(product.flatten(1)[None])


def _compress(
    compressor: Any, x: Tensor, slot: Tensor, caches: Sequence[Tensor], meta: Any, positions: Any
) -> Tensor:
    """Write the entries that end at the tokens x [1, N, hidden], and return the cache of entries.

    caches: the compressor's state and its cache of entries. positions: cos, sin and slots of the entries.
    """
    from dlinfer.framework.lmdeploy_ext.layers.compressed_attention.layers import partial_rotary

    layer, (state, cache), (cos, sin, slots) = compressor.compressor_impl.impl, caches, positions
    projections = (compressor.wkv(x)[0], compressor.wgate(x)[0])
    raw = layer.compress(*projections, compressor.ape, state, slot, meta)
    entries = partial_rotary(compressor.norm(raw)[:, None], cos, sin)[:, 0]
    layer.write(entries, cache, slots)
    return cache


def _choose(indexer: Any, x: Tensor, latent: Tensor, keys: Tensor, meta: Any, rotary: Any) -> Tensor:
    """Return the entries that an indexer chooses for each token: int32 [N, 1, count].

    The scale of the scores is left out: it is above zero and the same for all entries, so it changes no order.
    """
    from dlinfer.framework.lmdeploy_ext.layers.compressed_attention.layers import partial_rotary

    query = partial_rotary(indexer.wq_b(latent)[0].unflatten(-1, (-1, indexer.head_dim)), *rotary)
    return indexer.indexer_fwd(query, indexer.weights_proj(x)[0], keys, meta)


# --- weights

_OF_TRANSFORMERS = {
    "embed_tokens.weight": "embed.weight",
    "hc_head.hc_": "hc_head_",
    ".attn.norm.weight": ".attn.kv_norm.weight",
}
"""Parts of names in a checkpoint that transformers saved -> the same in DeepSeek's checkpoints."""


@_replaces(
    f"{_MODULE}:DeepseekV4ForCausalLM.load_weights",
    why="loads wo_a only from FP8, and does not know some names in checkpoints that transformers saved",
)
def _load_weights(original: Original, self: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    original(self, _taken(self, weights))


def _released_name(stored: str) -> str:
    """Return the name that DeepSeek's checkpoints have for a weight. stored: its name in a checkpoint."""
    name = stored.removeprefix("model.")
    for part, own in _OF_TRANSFORMERS.items():
        name = name.replace(part, own)
    return name


def _taken(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that LMDeploy's own code loads, under DeepSeek's names. Load wo_a here."""
    from lmdeploy.pytorch.weight_loader.model_weight_loader import load_weight

    parameters = dict(model.named_parameters())
    for stored, weight in weights:
        name = _released_name(stored)
        if name.endswith(".attn.wo_a.weight") and name in parameters:
            groups = weight.unflatten(0, (model.config.o_groups, -1))
            load_weight(parameters[name], groups.transpose(1, 2))
        else:
            yield name, weight
