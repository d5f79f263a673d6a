"""Refuse a quant_policy of LMDeploy that our devices do not serve, before weights load.

The functions here import the ops when they are called, so that importing LMDeploy does not load the ops.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device import devices
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.vendor import activate_default

_OPS = ("fill_quantised_kv_cache", "quantised_paged_prefill_attention", "quantised_paged_decode_attention")
_ADVICE = "use quant_policy=0, which keeps the KV cache in the model's dtype"


def is_served(quant_policy: int) -> bool:
    """Return whether our ops support the KV cache format of a quant_policy."""
    from dlinfer.ops.attention.kv_quantisation import STORED

    return quant_policy in STORED


def check_engine_config(config: Any) -> None:
    """Raise UnsupportedFeatureError for a quant_policy that our ops do not support or the device has no kernels for."""
    from lmdeploy.messages import QuantPolicy

    policy, device = config.quant_policy, config.device_type
    if not policy or policy not in list(QuantPolicy):
        return
    from dlinfer.ops.attention.kv_quantisation import STORED
    from dlinfer.ops.core.kernels import kernel_authors

    named = f"quant_policy={int(policy)} ({QuantPolicy(policy).name})"
    if not is_served(policy):
        raise refuse(named, f"use one of {', '.join(map(str, STORED))}, or 0 for none", device)
    vendor = activate_default(devices.torch_device(device))
    kernels = kernel_authors(vendor) if vendor is not None else {}
    missing = [op for op in _OPS if op not in kernels]
    if missing:
        raise refuse(f"{named} without a kernel of {missing[0]}", _ADVICE, device)


def check_model(model_config: Any, cache_config: Any) -> None:
    """Raise UnsupportedFeatureError if no cache of the configured quant_policy can hold a model's keys and values."""
    policy = getattr(cache_config, "quant_policy", 0)
    if not policy:
        return
    from dlinfer.ops.attention.kv_quantisation import INT4, is_scaled_by_token

    named = f"quant_policy={int(policy)}"
    if not getattr(model_config, "use_standard_kv_cache", True):
        what = "compressed attention, whose op reads windows and entries in the model's dtype"
        raise refuse(f"{named} with {what}", "use quant_policy=0")
    if getattr(model_config, "mla_index_topk", None) is not None:
        what = "sparse attention, whose op reads latents in the model's dtype"
        raise refuse(f"{named} with {what}", "use quant_policy=0")
    if is_scaled_by_token(policy) and model_config.v_head_dim == 0:
        what = "multi-head latent attention, whose values are a part of its keys and have no scales"
        raise refuse(f"{named} with {what}", "use quant_policy=16 or 0")
    dims = (model_config.k_head_dim, model_config.v_head_dim)
    sizes = [dim or model_config.head_dim for dim in dims]
    if policy == INT4 and any(size % 2 for size in sizes):
        raise refuse(
            f"{named} with key heads of {sizes[0]} and value heads of {sizes[1]} elements",
            "use quant_policy=8 or 0",
        )
