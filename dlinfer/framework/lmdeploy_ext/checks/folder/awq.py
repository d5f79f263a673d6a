"""Which AWQ checkpoints are served: those in the one layout that LMDeploy knows, which it takes all others for."""

from collections.abc import Mapping, Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import EXPERTS
from dlinfer.framework.lmdeploy_ext.conversion.experts import SERVED
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse

_ADVICE = "use the AWQ model of 4 bits, or the unquantised one in bfloat16 or float32"
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
# LMDeploy passes the names of a model's linear layers to few of its classes; these it never packs.
_NEVER_PACKED = ("lm_head", "embed_tokens", "norm")
_ROUTERS = ("gate", "shared_expert_gate")  # of models with experts, likewise


def check_awq(names: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise UnsupportedFeatureError for what LMDeploy would misread, or stop at in words of its own."""

    def refuse_awq(what: str) -> None:
        raise refuse(f"an AWQ model {what}", _ADVICE)

    bits, group_size = config.get("bits", 4), config.get("group_size", 128)
    layout = str(config.get("version") or config.get("format") or "gemm").lower()
    if bits != 4:
        refuse_awq(f"of {bits} bits")
    if layout != "gemm":
        refuse_awq(f"in the layout {layout!r}; LMDeploy reads 'gemm'")
    if not isinstance(group_size, int) or group_size <= 0:
        refuse_awq(f"with group_size={group_size!r}; LMDeploy needs a number of in_features")
    if not config.get("zero_point", True):
        refuse_awq("without zero points, which LMDeploy reads all the same")
    apart = config.get("modules_to_not_convert") or []
    has_experts = any(model.get(name) for name in EXPERTS)
    floats = (*_NEVER_PACKED, *(_ROUTERS if has_experts else ()))
    if unpacked := [name for name in apart if name.rpartition(".")[2] not in floats]:
        refuse_awq(f"with layers that are not packed ({', '.join(unpacked)})")
    for name in names if has_experts else ():
        if name not in SERVED:
            refuse_awq(f"with experts of {name}; served are {', '.join(SERVED)}")
    for name, size in _sizes(model).items():
        if size % group_size:
            refuse_awq(f"whose {name}={size} is no multiple of group_size={group_size}")


def _sizes(model: Mapping[str, Any]) -> dict[str, int]:
    """What groups must divide: in_features, and of q, k and v, gate and up, which LMDeploy joins, out_features."""
    sizes = {name: model.get(name) or 0 for name in _SIZES}
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    if heads and hidden and not model.get("kv_lora_rank"):  # latent attention joins nothing
        size = model.get("head_dim") or hidden // heads
        sizes["num_attention_heads * head_dim"] = heads * size
        sizes["num_key_value_heads * head_dim"] = (model.get("num_key_value_heads") or heads) * size
    return sizes
