"""Defines LMDeploy's layer backend for our devices. It chooses an implementation for each of LMDeploy's BuildSpecs."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lmdeploy.pytorch.backends.dlinfer.op_backend import DlinferOpsBackend
from lmdeploy.pytorch.backends.graph_runner import GraphRunner
from lmdeploy.pytorch.distributed import get_dist_manager

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.device import activation, cache_blocks
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers import attention, block_diffusion, lora
from dlinfer.framework.lmdeploy_ext.layers.compressed_attention import layers as compressed
from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta
from dlinfer.framework.lmdeploy_ext.layers.moe import experts, router
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rotary, windows
from dlinfer.framework.lmdeploy_ext.layers.quantised import eight_bit, four_bit, kv_quantisation
from dlinfer.framework.lmdeploy_ext.layers.sparse_attention import indexer
from dlinfer.framework.lmdeploy_ext.ranks import ray_cluster, sums
from dlinfer.framework.lmdeploy_ext.running.capture.runner import CaptureRunner
from dlinfer.framework.lmdeploy_ext.running.graph_runner import CompiledRunner
from dlinfer.framework.lmdeploy_ext.sampling import multinomial as sampling
from dlinfer.utils import computing
from dlinfer.utils.type_annotation import MoECommType, MoeMetadata
from dlinfer.vendor import activate_default

logger = logging.getLogger("dlinfer")

_OURS = {
    "PagedAttention": attention.PagedAttention.from_spec,
    "NSAIndexFP8": indexer.Indexer.from_spec,
    "FlashAttention": attention.VarlenAttention,
    "LoRA": lambda spec: lora.Lora(),
    "MultinomialSampling": sampling.SeededMultinomialSampling.from_spec,
    "RotaryEmbedding": rotary.from_spec,
    "ApplyRotaryEmb": lambda spec: rotary.ApplyRotary(),
    "RouterNoauxTC": router.BiasedRouter,
    "LinearW4A16": four_bit.LinearW4A16,
    "RMSNormW8A8": eight_bit.RMSNormW8A8,
    "LinearW8A8": eight_bit.LinearW8A8,
    "LinearBlockedF8": eight_bit.LinearBlockedF8,
    "LinearStaticF8": eight_bit.LinearStaticF8,
    "FusedMoEW8A8": eight_bit.FusedMoEW8A8,
    "FusedMoEBlockedF8": eight_bit.FusedMoEBlockedF8,
    "FusedMoEStaticF8": eight_bit.FusedMoEStaticF8,
    "FusedMoEW4A16": four_bit.FusedMoEW4A16,
    "FusedMoE": experts.Experts.from_spec,
    "CausalConv1d": lambda spec: gated_delta.Convolution(),
    "GatedDeltaMeta": lambda spec: gated_delta.StepStates(),
    "GatedDeltaRule": lambda spec: gated_delta.DeltaRule(),
    "V4Attention": compressed.CompressedAttention,
    "V4Indexer": compressed.EntryIndexer,
    "V4Compressor": compressed.WindowCompressor,
    "HCPrePost": compressed.HyperConnections,
}
"""Name of a BuildSpec, without "BuildSpec" -> our builder of the layer. LMDeploy's dlinfer backend has faults there."""


class EagerRunner(GraphRunner):
    """Runs a model's forward eagerly."""

    def __call__(self, **kwargs: Any) -> Any:
        computing.begins()
        return super().__call__(**kwargs)


class OpsBackend(DlinferOpsBackend):
    """LMDeploy's backend for our devices. The layers that it builds call ``dlinfer.ops``."""

    @staticmethod
    def get_name() -> str:
        """Return the name of the active device type."""
        device_type = activation.active()
        assert device_type is not None, "LMDeploy gets this backend for devices of ours only"
        return device_type

    @classmethod
    def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
        """Return the implementation of the layer that a BuildSpec describes.

        Raises UnsupportedFeatureError if our devices have no implementation. No weight is loaded by then.
        """
        name = type(spec).__name__
        build = _OURS.get(name.removesuffix("BuildSpec"))
        if build is not None:
            return build(spec)
        try:
            return super().build_op(spec, enable_deterministic=enable_deterministic)
        except RuntimeError as cause:
            if "is not supported by" not in str(cause):
                raise
            raise refuse(f"a layer of this model ({name})", "use another model") from cause

    @staticmethod
    def get_k_block_shape(
        block_size: int, num_heads: int, head_size: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Return the shape of one block of the key cache, in the active vendor's layout."""
        return cache_blocks.layout(activation.torch_device()).shape(1, block_size, num_heads, head_size)[1:]

    @staticmethod
    def get_v_block_shape(
        block_size: int, num_heads: int, head_size: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Return the shape of one block of the value cache, in the active vendor's layout."""
        return OpsBackend.get_k_block_shape(block_size, num_heads, head_size, dtype)

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        """Set the attention metadata, MoE metadata and position ids of a step's StepContext, and return it."""
        metadata, model = attention.step_metadata(step_context), step_context.model_config
        if block_diffusion.is_used(model):
            block_diffusion.note_blocks(metadata, model.dllm_block_length)
        step_context.attn_metadata = metadata
        step_context.position_ids = rope_lengths.of_step(step_context)
        distribution = get_dist_manager().current_context()
        assert distribution is not None, "LMDeploy sets it before it builds a model"
        config = distribution.dist_config
        step_context.moe_metadata = MoeMetadata(
            dp_size=config.dp, tp_size=config.tp, ep_size=config.ep, moe_comm_type=MoECommType.ALLGATHER
        )
        return step_context

    @staticmethod
    def build_graph_runner(
        model: torch.nn.Module,
        model_config: Any,
        cache_config: Any,
        backend_config: Any,
        device: torch.device,
    ) -> Any:
        """Return the runner of a model: an EagerRunner if ``eager_mode=True``, else a runner for graphs."""
        kv_quantisation.check_model(model_config, cache_config)
        config = model_config.llm_config or model_config.hf_config
        windows.check_chunks(config, cache_config.kernel_block_size)
        windows.apply(model, config)
        runner = EagerRunner if backend_config.eager_mode else _graph_runner(model)
        return runner(model, model_config, cache_config, backend_config, device)

    @classmethod
    def build_communicator(cls, cpu_group: Any, device_group: Any, dist_config: Any) -> Any:
        """Return the communicator that sums tensors over one group of ranks."""
        base = super().build_communicator(cpu_group, device_group, dist_config)
        return sums.communicator(type(base), device_group)

    @staticmethod
    def support_ray() -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  LMDeploy's returns the literal False
        """Return whether Ray may start ranks on the active device."""
        return ray_cluster.is_served(OpsBackend.get_name())

    @staticmethod
    def ccl_backend() -> str:
        """Return the name of the torch.distributed backend that connects devices of the active type."""
        return activation.device().communicator


def _graph_runner(model: torch.nn.Module) -> Callable[..., Any]:
    """Return the class of the runner for graph mode.

    - The vendor's own runner is used if the vendor has one.
    - Else CompiledRunner is used if there is a graph engine.
    - Else CaptureRunner is used if the device can capture graphs.
    - Else EagerRunner is used, with a warning.
    """
    device = activation.device()
    own = device.graph_runner()
    if own is not None:
        return own
    vendor = activate_default(activation.torch_device())
    if settings.current().engine or (vendor is not None and vendor.default_engine):
        return CompiledRunner
    if device.graph_class is None:
        logger.warning(
            "device %s cannot capture graphs here, so every step runs eagerly", activation.active()
        )
        return EagerRunner
    return partial(CaptureRunner, device, adapters=lora.has_adapters(model))
