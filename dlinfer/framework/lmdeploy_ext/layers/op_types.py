"""Our layers for LMDeploy before 0.18, which names a layer by an OpType and hands its builder positional arguments.

From 0.18 on it hands over one BuildSpec, which is what our layers read. Here the arguments become such a record, named
by the parameters of LMDeploy's own abstract builders.
"""

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.refusing import refuse

_BACKENDS = "lmdeploy.pytorch.backends"
BUILDERS = {
    "PagedAttention": "attention:AttentionBuilder",
    "FlashAttention": "flash_attention:FlashAttentionBuilder",
    "LoRA": "lora:LoRABuilder",
    "MultinomialSampling": "multinomial_sampling:MultinomialSamplingBuilder",
    "RotaryEmbedding": "rotary_embedding:RotaryEmbeddingBuilder",
    "ApplyRotaryEmb": "apply_rotary_emb:ApplyRotaryEmbBuilder",
    "RouterNoauxTC": "moe_router:RouterNoauxTCBuilder",
    "LinearW4A16": "awq_modules:LinearW4A16Builder",
    "RMSNormW8A8": "qmodules:RMSNormW8A8Builder",
    "LinearW8A8": "qmodules:LinearW8A8Builder",
    "LinearBlockedF8": "blockedf8_modules:LinearBlockedF8Builder",
    "LinearStaticF8": "static_fp8_modules:LinearStaticF8Builder",
    "FusedMoEW8A8": "moe:FusedMoEW8A8Builder",
    "FusedMoEBlockedF8": "moe:FusedMoEBlockedF8Builder",
    "FusedMoEStaticF8": "moe:FusedMoEStaticF8Builder",
    "FusedMoEW4A16": "moe:FusedMoEW4A16Builder",
    "FusedMoE": "moe:FusedMoEBuilder",
    "CausalConv1d": "causal_conv1d:CausalConv1dBuilder",
    "GatedDeltaRule": "gated_delta_rule:GatedDeltaRuleBuilder",
}
"""OpType -> LMDeploy's builder of it, whose ``build`` has the parameters."""

RENAMED = {
    "head_size": "head_dim",
    "v_head_size": "v_head_dim",
    "out_dtype": "output_dtype",
    "dtype": "output_dtype",
    "topk_group": "top_k_group",
}
"""Parameter of a builder -> the field that 0.18 has for it."""

DEFAULTS = {
    "PagedAttention": {"use_flash_mla": False, "mla_index_topk": None, "block_sparse_size": 1},
    "FusedMoEW8A8": {"ep_size": 1},
    "LinearStaticF8": {"fp8_dtype": "float8_e4m3fn"},
    "LinearBlockedF8": {"scale_fmt": None},
    "FusedMoEBlockedF8": {"scale_fmt": None, "custom_gateup_act": False},
}
"""Fields that our layers read and that the builders have no parameter for, with what their absence means."""


def builder(op_type: str, build: Callable[[Any], Any]) -> type:
    """What LMDeploy takes for a builder: a class whose ``build`` makes our layer.

    op_type: the OpType's name. build: takes a record with the fields of the BuildSpec. Raises UnsupportedFeatureError
    for a layer that needs LMDeploy 0.18.
    """
    if op_type not in BUILDERS:
        raise refuse(f"a layer of this model ({op_type})", "install LMDeploy 0.18")
    module, _, name = BUILDERS[op_type].partition(":")
    signature = inspect.signature(getattr(importlib.import_module(f"{_BACKENDS}.{module}"), name).build)

    def build_layer(*args: Any, **kwargs: Any) -> Any:
        return build(record(op_type, signature, args, kwargs))

    return type(f"Our{op_type}Builder", (), {"build": staticmethod(build_layer)})


def record(
    op_type: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SimpleNamespace:
    """The fields of the BuildSpec, of a builder's arguments. What only one caller gives is a field as well."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    given |= given.pop("kwargs", {})
    fields = {RENAMED.get(name, name): value for name, value in given.items()}
    return SimpleNamespace(**DEFAULTS.get(op_type, {}) | fields)
