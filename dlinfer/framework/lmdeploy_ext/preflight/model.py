"""Builds LMDeploy's model of a folder on torch's device ``meta``, with the backend of the chosen device.

The model has the same layers as in an engine, so building it refuses every layer that an engine would refuse.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.checks.model import block_diffusion
from dlinfer.framework.lmdeploy_ext.preflight.memory import FLOAT32, widest

_OPS = {
    "PagedAttention": "fill_kv_cache prefill_attention paged_prefill_attention paged_decode_attention",
    "SparseAttention": "fill_kv_cache sparse_flash_attention",
    "Indexer": "fill_kv_cache lightning_indexer",
    "DlinferRMSNormImpl": "rms_norm add_rms_norm",
    "DlinferLinearImpl": "linear",
    "DlinferSiluAndMulImpl": "silu_and_mul",
    "ApplyRotary": "apply_rotary_pos_emb",
    "DlinferSoftmaxTopKImpl": "moe_gating_topk_softmax",
    "Experts": "fused_moe fused_moe_clamped fused_moe_limited",
    "CompressedAttention": "compressed_attention",
    "EntryIndexer": "compressed_indexer",
    "WindowCompressor": "compress_windows fill_kv_cache",
    "HyperConnections": "sinkhorn",
    "VarlenAttention": "prefill_attention",
    "Lora": "lora_linear",
    "Convolution": "causal_conv1d",
    "DeltaRule": "gated_delta_rule",
    "LinearW4A16": "weight_quant_matmul",
    "FusedMoEW4A16": "fused_moe_w4a16",
    "FusedMoEMxfp4": "fused_moe_mxfp4",
    "FusedMoELimitedMxfp4": "fused_moe_limited_mxfp4",
    "RMSNormW8A8": "rms_norm_w8a8 add_rms_norm_w8a8",
    "LinearW8A8": "dynamic_quant linear_w8a8",
    "LinearBlockedF8": "linear_blocked_fp8",
    "LinearStaticF8": "linear_static_fp8",
    "FusedMoEW8A8": "fused_moe_w8a8",
    "FusedMoEBlockedF8": "fused_moe_blocked_fp8",
    "FusedMoEStaticF8": "fused_moe_static_fp8",
}
"""Class that computes a layer -> the ops that it calls. Classes that are not listed compute in plain torch."""


@dataclass(frozen=True)
class Built:
    """LMDeploy's objects for one model folder.

    engine: the PytorchEngineConfig. config: the ModelConfig. cache: the CacheConfig. module: the model, on ``meta``.
    block_bytes: size in bytes of one KV cache block, summed over all layers.
    """

    engine: Any
    config: Any
    cache: Any
    module: torch.nn.Module
    block_bytes: int

    @property
    def weight_bytes(self) -> int:
        """The size of all parameters in bytes. Shared parameters count once, and so does a tied output projection."""
        parameters = dict(self.module.named_parameters())
        if self.config.tie_word_embeddings:
            parameters.pop("lm_head.weight", None)
        return sum(parameter.nbytes for parameter in parameters.values())

    @property
    def packs_head(self) -> bool:
        """Whether the output projection is packed while it loads, so that it takes fewer bytes than in the files."""
        return hasattr(getattr(self.module, "lm_head", None), "numbers")

    @property
    def packing(self) -> Any:
        """The object that packs weights while they load, or None.

        See ``layers.quantised.packing`` and ``layers.quantised.gguf_packing``.
        """
        return getattr(self.module, "packing", None)

    @property
    def ops(self) -> list[str]:
        """The names of the ops that the model's layers call, each once, in the order of the layers."""
        called = [op for name in self.implementations for op in _OPS.get(name, "").split()]
        called += self.packing.ops if self.packing is not None else ()
        return list(dict.fromkeys(called))

    @property
    def plain(self) -> list[str]:
        """The names of the classes whose layers are computed in plain torch, without an op of ours."""
        return [name for name in self.implementations if name not in _OPS]

    @property
    def implementations(self) -> list[str]:
        """The names of the classes that implement the model's layers, each once."""
        attributes = ("impl", "rotary_impl", "index_impl")
        layers = (getattr(module, name, None) for module in self.module.modules() for name in attributes)
        return list(dict.fromkeys(type(impl).__name__ for impl in layers if impl is not None))

    @property
    def widest(self) -> int:
        """The number of elements that one token takes in the buffers of a layer."""
        config, text = self.config, self.config.llm_config or self.config.hf_config
        attention = config.num_attention_heads * config.k_head_dim
        attention += config.num_key_value_heads * (config.k_head_dim + config.v_head_dim)
        experts = getattr(text, "num_experts_per_tok", 0) or 0
        chosen = 0
        if config.mla_index_topk is not None:  # an indexer's queries and keys, and positions of 4 bytes each
            attention += (text.index_n_heads + 1) * text.index_head_dim
            chosen = config.mla_index_topk * FLOAT32 // config.dtype.itemsize
        inner = getattr(text, "moe_intermediate_size", 0) if experts else 0
        inner = inner or getattr(text, "intermediate_size", 0) or 4 * config.hidden_size
        return widest(config.hidden_size, attention, inner, experts) + chosen


def engine_config(device: str, **options: Any) -> Any:
    """Return a PytorchEngineConfig, completed as an engine completes it. Raises an error for refused options.

    options: fields of PytorchEngineConfig; None keeps the field's default.
    """
    from lmdeploy import PytorchEngineConfig
    from lmdeploy.pytorch.engine.config_builder import ConfigBuilder

    chosen = {name: value for name, value in options.items() if value is not None}
    return ConfigBuilder.update_engine_config(PytorchEngineConfig(device_type=device, **chosen))


def build(folder: Path, engine: Any, trust_remote_code: bool = False) -> Built:
    """Read a folder's configuration, and build LMDeploy's model on ``meta``.

    engine: the result of ``engine_config``. Raises UnsupportedFeatureError and LMDeploy's own errors.
    """
    from lmdeploy.pytorch.config import ModelConfig
    from lmdeploy.pytorch.devices import DeviceContext, get_device_manager
    from lmdeploy.pytorch.distributed import DistContext, get_dist_manager
    from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
    from lmdeploy.pytorch.model_inputs import BuildModelContext
    from lmdeploy.pytorch.models.patch import build_patched_model

    distribution = ConfigBuilder.build_dist_config(engine)
    config = ModelConfig.from_pretrained(
        str(folder),
        trust_remote_code=trust_remote_code,
        dtype=engine.dtype,
        dist_config=distribution,
        device_type=engine.device_type,
        block_size=engine.block_size,
    )
    cache = ConfigBuilder.build_cache_config(engine)
    cache.window_size = config.sliding_window
    if config.update_cache_config_func is not None:  # DeepSeek-V4's blocks have a fixed size
        config.update_cache_config_func(cache)
    misc = ConfigBuilder.build_misc_config(engine)
    block_diffusion.check_options(config, cache, misc)
    misc.dllm_config.block_length = misc.dllm_config.block_length or config.dllm_block_length
    context = BuildModelContext(
        dllm_config=misc.dllm_config,
        quant_config=config.quant_config,
        fp32_lm_head=config.fp32_lm_head,
        tie_word_embeddings=config.tie_word_embeddings,
        max_batch_size=cache.max_batches,
    )
    here = DistContext.build(0, distribution)
    with get_dist_manager().context(here), get_device_manager().context(DeviceContext(engine.device_type)):
        module = build_patched_model(config, device=torch.device("meta"), build_model_ctx=context)
        block_bytes = _block_bytes(config, cache, module)
    return Built(engine, config, cache, module, block_bytes)


def _block_bytes(config: Any, cache: Any, module: torch.nn.Module) -> int:
    """Return the size in bytes of one KV cache block, summed over all layers. LMDeploy itself computes it."""
    from lmdeploy.pytorch.engine.cache_engine.collector import collect_block_cache_requests
    from lmdeploy.pytorch.engine.cache_engine.plan import build_block_cache_plan

    collect = partial(collect_block_cache_requests, module)
    return build_block_cache_plan(config, cache, 1, request_collector=collect).logical_block_nbytes


def kv_blocks(built: Built, free: int) -> tuple[int, int]:
    """Return (KV cache blocks, tokens of a prefill) that an engine would choose with ``free`` bytes of memory.

    LMDeploy's own planner chooses them, with the adaptor's patches. Raises MemoryPlanError if the cache does not fit
    into the memory.
    """
    from lmdeploy.pytorch.engine.executor import base

    planner: Any = object.__new__(base.ExecutorBase)
    planner.model_config, planner.cache_config = built.config, built.cache
    planner.device_type = built.engine.device_type
    sizes = [base._WorkerCachePlanSizes(built.block_bytes)]
    left = planner._reserve_runtime_mem([free], sizes, None)
    planner._update_num_gpu_blocks(left, sizes, None)
    return built.cache.num_gpu_blocks, built.cache.max_prefill_token_num
