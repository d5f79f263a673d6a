"""LMDeploy's layer backend on our devices: which implementation each of its build specs gets."""

from collections.abc import Callable
from typing import Any

import torch
from lmdeploy.pytorch.backends.apply_rotary_emb import ApplyRotaryEmbBuildSpec
from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.awq_modules import LinearW4A16BuildSpec
from lmdeploy.pytorch.backends.blockedf8_modules import LinearBlockedF8BuildSpec
from lmdeploy.pytorch.backends.causal_conv1d import CausalConv1dBuildSpec
from lmdeploy.pytorch.backends.dlinfer.op_backend import DlinferOpsBackend
from lmdeploy.pytorch.backends.flash_attention import FlashAttentionBuildSpec
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMetaBuildSpec, GatedDeltaRuleBuildSpec
from lmdeploy.pytorch.backends.graph_runner import GraphRunner
from lmdeploy.pytorch.backends.lora import LoRABuildSpec
from lmdeploy.pytorch.backends.moe import (
    FusedMoEBlockedF8BuildSpec,
    FusedMoEBuildSpec,
    FusedMoEStaticF8BuildSpec,
    FusedMoEW4A16BuildSpec,
    FusedMoEW8A8BuildSpec,
)
from lmdeploy.pytorch.backends.moe_router import RouterNoauxTCBuildSpec
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuildSpec
from lmdeploy.pytorch.backends.nsa import NSAIndexFP8BuildSpec
from lmdeploy.pytorch.backends.qmodules import LinearW8A8BuildSpec, RMSNormW8A8BuildSpec
from lmdeploy.pytorch.backends.rotary_embedding import RotaryEmbeddingBuildSpec
from lmdeploy.pytorch.backends.static_fp8_modules import LinearStaticF8BuildSpec
from lmdeploy.pytorch.distributed import get_dist_manager

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.device import activation, cache_blocks
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse
from dlinfer.framework.lmdeploy_ext.layers import attention, lora, sampling
from dlinfer.framework.lmdeploy_ext.layers.graph_runner import CompiledRunner
from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta
from dlinfer.framework.lmdeploy_ext.layers.moe import experts, router
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rotary, windows
from dlinfer.framework.lmdeploy_ext.layers.quantised import awq, eight_bit, four_bit_experts, kv_quantisation
from dlinfer.framework.lmdeploy_ext.layers.sparse_attention import indexer
from dlinfer.utils.type_annotation import MoECommType, MoeMetadata
from dlinfer.vendor import activate_default

_OURS = {
    PagedAttentionBuildSpec: attention.PagedAttention.from_spec,
    NSAIndexFP8BuildSpec: indexer.Indexer.from_spec,
    FlashAttentionBuildSpec: attention.VarlenAttention.from_spec,
    LoRABuildSpec: lora.Lora.from_spec,
    MultinomialSamplingBuildSpec: sampling.SeededMultinomialSampling.from_spec,
    RotaryEmbeddingBuildSpec: rotary.from_spec,
    ApplyRotaryEmbBuildSpec: lambda spec: rotary.ApplyRotary(),
    RouterNoauxTCBuildSpec: router.BiasedRouter.from_spec,
    LinearW4A16BuildSpec: awq.LinearW4A16.from_spec,
    RMSNormW8A8BuildSpec: eight_bit.RMSNormW8A8.from_spec,
    LinearW8A8BuildSpec: eight_bit.LinearW8A8.from_spec,
    LinearBlockedF8BuildSpec: eight_bit.LinearBlockedF8.from_spec,
    LinearStaticF8BuildSpec: eight_bit.LinearStaticF8.from_spec,
    FusedMoEW8A8BuildSpec: eight_bit.FusedMoEW8A8.from_spec,
    FusedMoEBlockedF8BuildSpec: eight_bit.FusedMoEBlockedF8.from_spec,
    FusedMoEStaticF8BuildSpec: eight_bit.FusedMoEStaticF8.from_spec,
    FusedMoEW4A16BuildSpec: four_bit_experts.FusedMoEW4A16.from_spec,
    FusedMoEBuildSpec: experts.Experts.from_spec,
    CausalConv1dBuildSpec: lambda spec: gated_delta.Convolution(),
    GatedDeltaMetaBuildSpec: lambda spec: gated_delta.StepStates(),
    GatedDeltaRuleBuildSpec: lambda spec: gated_delta.DeltaRule(),
}
"""Build specs that LMDeploy's own dlinfer backend serves wrongly or not at all."""


class OpsBackend(DlinferOpsBackend):
    """Layers on the device of ours that LMDeploy runs on, through ``dlinfer.ops``."""

    @staticmethod
    def get_name() -> str:
        """Name of the device type."""
        return _device_type()

    @classmethod
    def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
        """The implementation of one layer. Raises UnsupportedFeatureError, before any weight is loaded."""
        build = _OURS.get(type(spec))
        if build is not None:
            return build(spec)
        name = type(spec).__name__
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
        """Shape of one block of the key cache, in the active vendor's layout."""
        return cache_blocks.layout(activation.torch_device()).shape(1, block_size, num_heads, head_size)[1:]

    @staticmethod
    def get_v_block_shape(
        block_size: int, num_heads: int, head_size: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Shape of one block of the value cache, in the active vendor's layout."""
        return OpsBackend.get_k_block_shape(block_size, num_heads, head_size, dtype)

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        """Add the step's attention and MoE metadata and rotary lengths to the context, and return it."""
        step_context.attn_metadata = attention.step_metadata(step_context)
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
        """What runs the model: compiled graphs, or with ``eager_mode=True`` the model itself."""
        kv_quantisation.check_model(model_config, cache_config)
        windows.apply(model, model_config.llm_config or model_config.hf_config)
        runner = GraphRunner if backend_config.eager_mode else _graph_runner()
        return runner(model, model_config, cache_config, backend_config, device)

    @staticmethod
    def ccl_backend() -> str:
        """The backend of torch.distributed between processes that have such a device each."""
        return activation.device().communicator


def _device_type() -> str:
    device_type = activation.active()
    assert device_type is not None, "LMDeploy gets this backend for devices of ours only"
    return device_type


def _graph_runner() -> Callable[..., Any]:
    """What runs graphs: the vendor's own runner, else compiled calls; a vendor of kernels alone has nothing to compile
    with."""
    own = activation.device().graph_runner()
    if own is not None:
        return own
    vendor = activate_default(activation.torch_device())
    has_engine = settings.current().engine or (vendor is not None and vendor.default_engine)
    return CompiledRunner if has_engine else GraphRunner
