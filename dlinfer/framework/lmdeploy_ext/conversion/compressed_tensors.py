"""Checkpoints of compressed-tensors, as llm-compressor writes them (github.com/neuralmagic/compressed-tensors).

Of each linear layer, with w the weight [out, in]:

- ``pack-quantized``: ``weight_packed`` int32 [out, in / 8] of w's numbers and 8, ``weight_scale`` [out, groups],
  ``weight_shape``, and where it is not symmetric ``weight_zero_point`` int32 [out / 8, groups];
- ``int-quantized``, ``float-quantized`` and ``naive-quantized``, which is either: ``weight`` in 8 bits [out, in],
  ``weight_scale`` [out, 1], [1], or for each block, and with fixed scales ``input_scale`` [1].
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import four_bits, packed_experts
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Convert, Plan
from dlinfer.ops.quantised.packing import GPTQ

_WORDS = replace(GPTQ, zero_bias=0)
"""How ``weight_packed``, transposed, lies."""

# Layers that no checkpoint packs and no class of LMDeploy's expects packed; a rule may leave them out.
_NEVER_PACKED = ("lm_head", "embed_tokens", "norm", "gate", "shared_expert_gate")
_DENSE = ("gate_proj", "up_proj", "down_proj")
_LAYERS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{part}{name}" for name in _DENSE for part in ("", "experts.0.", "shared_expert.")),
    *(f"block_sparse_moe.experts.0.{name}" for name in ("w1", "w2", "w3")),
)
_PLAIN = {"kv_cache_scheme": "a quantised KV cache", "transform_config": "transforms"}
_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}


def plan(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """The plan of a checkpoint, whose layers become AWQ's, smooth_quant's or fp8's. Raises UnsupportedFeatureError."""
    layout = str(config.get("format") or "without a format")
    checkpoint = Checkpoint(f"compressed-tensors {layout}", config, model)
    checkpoint.require(layout in _FORMATS, "")
    status = config.get("quantization_status")  # a tensor that is in floats all the same is met as it is read
    checkpoint.require(status in ("compressed", "frozen"), f"with quantization_status {status}")
    for key, what in _PLAIN.items():
        checkpoint.require(not config.get(key), f"with {what}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    checkpoint.require(sparsity == "dense", f"with sparse weights ({sparsity})")
    groups = config.get("config_groups") or {}
    checkpoint.require(len(groups) == 1, f"in {len(groups)} ways at once")
    (group,) = groups.values()
    checkpoint.require(group.get("targets") == ["Linear"], f"with targets {group.get('targets')}")
    checkpoint.require(group.get("format") in (None, layout), f"with a group in {group.get('format')}")
    checkpoint.require(not group.get("output_activations"), "with outputs quantised")
    _check_ignored(config.get("ignore") or [], checkpoint)
    checkpoint.require_plain()
    weights, inputs = (_scheme(group.get(part)) for part in ("weights", "input_activations"))
    return _FORMATS[layout](weights, inputs, checkpoint)


def _scheme(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """How weights or inputs are quantised, with what may be left out; empty where they are not."""
    return {"symmetric": True, "dynamic": False, "type": "int", **given} if given else {}


def _check_ignored(rules: list[str], checkpoint: Checkpoint) -> None:
    """Refuse rules by which some of a decoder's layers stay as they are, or by which lm_head does not.

    All but experts may: see ``_experts_alone``.
    """
    packed = _names(checkpoint)
    left = next((name for name in packed if _ignores(rules, name)), "")
    if _experts_alone(rules, checkpoint):
        left = ""
    named = (rule for rule in rules if not rule.startswith("re:") and rule not in packed)
    other = next((rule for rule in named if rule.rpartition(".")[2] not in _NEVER_PACKED), "")
    checkpoint.require_packed(not (left or other), left or other)
    checkpoint.require(_ignores(rules, "lm_head"), "with lm_head quantised")


def _names(checkpoint: Checkpoint) -> list[str]:
    """A decoder's linear layers as checkpoints name them, whichever of them the model has."""
    layers = checkpoint.model.get("num_hidden_layers") or 1
    return [f"model.layers.{layer}.{name}" for layer in range(layers) for name in _LAYERS]


def _ignores(rules: list[str], name: str) -> bool:
    return any(re.match(rule[3:], name) if rule.startswith("re:") else rule == name for rule in rules)


def _experts_alone(rules: list[str], checkpoint: Checkpoint) -> bool:
    """Whether rules leave all of a decoder's linear layers as they are but its experts, which are of 4 bits."""
    model = checkpoint.model
    if not checkpoint.has_experts or checkpoint.config.get("format") != "pack-quantized":
        return False
    has_dense = bool(model.get("mlp_only_layers")) or (model.get("decoder_sparse_step") or 1) > 1
    for name in _names(checkpoint):
        is_expert = ".experts." in name
        exists = "self_attn" in name or is_expert or (has_dense and name.rpartition(".")[0].endswith("mlp"))
        if exists and _ignores(rules, name) == is_expert:
            return False
    return True


def _has(given: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(given.get(key) == value for key, value in expected.items())


def _shown(given: Mapping[str, Any]) -> str:
    """What of a scheme decides, for a refusal."""
    keys = (
        "num_bits",
        "type",
        "strategy",
        "group_size",
        "block_structure",
        "symmetric",
        "dynamic",
        "actorder",
    )
    return ", ".join(f"{key}={given[key]}" for key in keys if given.get(key) is not None) or "none"


# --- weights of 4 bits


def _packed(weights: Mapping[str, Any], inputs: Mapping[str, Any], checkpoint: Checkpoint) -> Plan:
    checkpoint.require_served_experts()
    strategy = weights.get("strategy")
    served = _has(weights, {"num_bits": 4, "type": "int", "dynamic": False})
    checkpoint.require(served and strategy in ("group", "channel"), f"with weights {_shown(weights)}")
    checkpoint.require(not inputs, f"with inputs {_shown(inputs)}")
    order = weights.get("actorder") or "static"
    checkpoint.require(
        order in ("static", "weight"), f"with actorder {order}: inputs are grouped in another order"
    )
    stored = four_bits.stored_group(weights.get("group_size") if strategy == "group" else -1, checkpoint)
    symmetric = weights["symmetric"]
    if _experts_alone(checkpoint.config.get("ignore") or [], checkpoint):
        return packed_experts.plan(stored, symmetric, checkpoint)

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        owner, _, part = name.rpartition(".")
        if part in ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"):
            checkpoint.require_floats_apart(layer, owner)
        if part == "weight_packed":
            yield four_bits.weight(owner, tensor.t(), _WORDS)
        elif part == "weight_scale":
            given = tensor.t()
            yield four_bits.scales(owner, given, stored, layer, checkpoint)
            if symmetric:
                middle = torch.full(given.shape, _WORDS.middle, dtype=torch.int32)
                yield four_bits.zeros(owner, middle, stored, layer, checkpoint)
        elif part == "weight_zero_point":
            if not symmetric:
                yield four_bits.zeros(owner, _WORDS.unpack_zeros(tensor.t()), stored, layer, checkpoint)
        elif part == "weight_g_idx":
            four_bits.require_order(owner, tensor, stored, checkpoint)
        elif part != "weight_shape":
            checkpoint.require_packed(part != "weight" or not hasattr(layer, "group_size"), owner)
            yield name, tensor

    return Plan(four_bits.awq_config(stored, checkpoint), convert)


# --- weights and activations of 8 bits


def _int8(weights: Mapping[str, Any], inputs: Mapping[str, Any], checkpoint: Checkpoint) -> Plan:
    of_rows = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    checkpoint.require(_has(weights, of_rows), f"with weights {_shown(weights)}")
    checkpoint.require(_has(inputs, {"num_bits": 8, "type": "int"} | _TOKEN), f"with inputs {_shown(inputs)}")
    config = checkpoint.named({"quant_method": "smooth_quant", "quant_dtype": "int8"})
    return Plan(config, _renamed("scale", checkpoint))


def _float8(weights: Mapping[str, Any], inputs: Mapping[str, Any], checkpoint: Checkpoint) -> Plan:
    of_eight = {"num_bits": 8, "type": "float", "symmetric": True}
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    checkpoint.require(_has(weights, of_eight), f"with weights {_shown(weights)}")
    checkpoint.require(_has(inputs, of_eight), f"with inputs {_shown(inputs)}")
    if strategy == "channel" and _has(inputs, _TOKEN):
        config = checkpoint.named({"quant_method": "smooth_quant", "quant_dtype": "float8_e4m3fn"})
        return Plan(config, _renamed("scale", checkpoint))
    fp8 = checkpoint.named({"quant_method": "fp8", "fmt": "e4m3"})
    if strategy in ("tensor", "channel") and inputs.get("strategy") == "tensor" and not inputs.get("dynamic"):
        if strategy == "channel":
            checkpoint.require_dense()
        return Plan(fp8 | {"activation_scheme": "static"}, _with_fixed_inputs(checkpoint))
    of_blocks = _has(inputs, {"strategy": "group", "group_size": 128, "dynamic": True})
    schemes = f"weights {_shown(weights)}, and inputs {_shown(inputs)}"
    checkpoint.require(
        strategy == "block" and block and list(block) == [128, 128] and of_blocks, f"with {schemes}"
    )
    return Plan(fp8 | {"weight_block_size": [128, 128]}, _renamed("weight_scale_inv", checkpoint))


def _renamed(scale: str, checkpoint: Checkpoint) -> Convert:
    """Scales get the name that LMDeploy's parameter has; all else stays."""

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        owner, _, part = name.rpartition(".")
        _check_eight_bits(name, tensor, layer, checkpoint)
        if part == "weight_scale":
            yield f"{owner}.{scale}", tensor.float()
        elif not _is_zero_point(name, tensor, checkpoint):
            yield name, tensor

    return convert


def _is_zero_point(name: str, tensor: Tensor, checkpoint: Checkpoint) -> bool:
    """Whether a tensor is one of zero points, which early releases store where all of them are 0."""
    found = name.endswith(("weight_zero_point", "input_zero_point"))
    checkpoint.require(not found or not tensor.float().any(), f"with zero points, {name}")
    return found


def _check_eight_bits(name: str, tensor: Tensor, layer: Any, checkpoint: Checkpoint) -> None:
    """Refuse a router in 8 bits, which LMDeploy has in floats, and a layer in floats, which it has in 8 bits.

    LMDeploy would round the floats of the one to whole numbers, and stops at the other in words of its own.
    """
    owner, _, part = name.rpartition(".")
    is_left = owner.rpartition(".")[2] in _NEVER_PACKED
    checkpoint.require(part != "weight_scale" or not is_left, f"with {owner} quantised")
    if part == "weight" and layer is not None:
        checkpoint.require_packed(layer.weight.dtype.itemsize > 1 or tensor.dtype.itemsize == 1, owner)


def _with_fixed_inputs(checkpoint: Checkpoint) -> Convert:
    """All stays, but that layers which LMDeploy joins must have one scale for their one input."""
    seen: dict[int, Tensor] = {}  # identity of a layer -> the scale of its input

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        _check_eight_bits(name, tensor, layer, checkpoint)
        if name.endswith(".input_scale") and layer is not None:
            before = seen.setdefault(id(layer), tensor)
            what = f"with scales of their own for the input that {name} and its neighbours share"
            checkpoint.require(torch.equal(before.reshape(-1), tensor.reshape(-1)), what)
        if not _is_zero_point(name, tensor, checkpoint):
            yield name, tensor

    return convert


def _naive(weights: Mapping[str, Any], inputs: Mapping[str, Any], checkpoint: Checkpoint) -> Plan:
    return (_float8 if weights.get("type") == "float" else _int8)(weights, inputs, checkpoint)


_FORMATS = {
    "pack-quantized": _packed,
    "int-quantized": _int8,
    "float-quantized": _float8,
    "naive-quantized": _naive,  # as early releases call the two before
}
