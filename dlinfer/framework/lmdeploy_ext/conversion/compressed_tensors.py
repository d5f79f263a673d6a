"""Plans the conversion of compressed-tensors checkpoints, which llm-compressor writes.

The format is described at github.com/neuralmagic/compressed-tensors. For a linear layer with a weight [out, in] the
checkpoint has these tensors:

- ``pack-quantized``: ``weight_packed`` int32 [out, in / 8], which holds the weight's numbers plus 8; ``weight_scale``
  [out, groups]; ``weight_shape``; for asymmetric weights also ``weight_zero_point`` int32 [out / 8, groups];
- ``int-quantized`` and ``float-quantized``: ``weight`` in 8 bits [out, in]; ``weight_scale``, which is [out, 1] if each
  row has a scale, and [1] if the tensor has one, and otherwise has one scale for each block; ``input_scale`` [1] if the
  input's scale is static.

Early releases used the name ``naive-quantized`` for both ``int-quantized`` and ``float-quantized``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Convert, Plan
from dlinfer.framework.lmdeploy_ext.conversion.four_bits import FourBits, plan_of_experts, stored_group
from dlinfer.ops.quantised.packing import GPTQ

_WORDS = replace(GPTQ, zero_bias=0)
"""The layout of the words in a transposed ``weight_packed``."""

# Layers that no checkpoint packs and no class of LMDeploy's expects packed. Ignore rules may name them.
_NEVER_PACKED = ("lm_head", "embed_tokens", "norm", "gate", "shared_expert_gate")
_DENSE = ("gate_proj", "up_proj", "down_proj")
_LAYERS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{part}{name}" for name in _DENSE for part in ("", "experts.0.", "shared_expert.")),
    *(f"block_sparse_moe.experts.0.{name}" for name in ("w1", "w2", "w3")),
)
_PLAIN = {"kv_cache_scheme": "a quantised KV cache", "transform_config": "transforms"}
_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
_SHOWN = "num_bits type strategy group_size block_structure symmetric dynamic actorder".split()


class _Scheme(dict[str, Any]):
    """The quantisation scheme of weights or inputs, with defaults filled in; empty if they are not quantised."""

    def __init__(self, stored: Mapping[str, Any] | None) -> None:
        super().__init__({"symmetric": True, "dynamic": False, "type": "int", **stored} if stored else {})

    def has(self, **expected: Any) -> bool:
        """Return whether the scheme has all of the ``expected`` values."""
        return all(self.get(key) == value for key, value in expected.items())

    def __str__(self) -> str:
        return ", ".join(f"{key}={self[key]}" for key in _SHOWN if self.get(key) is not None) or "none"


def plan(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """Return the plan that converts a compressed-tensors checkpoint to AWQ, smooth_quant, fp8 or packed experts.

    config: the checkpoint's ``quantization_config``. model: the contents of config.json. Raises UnsupportedFeatureError
    for a checkpoint that cannot be converted.
    """
    layout = str(config.get("format") or "without a format")
    checkpoint = Checkpoint(f"compressed-tensors {layout}", config, model)
    checkpoint.require(layout in _FORMATS, "")
    # A tensor that is in floats in spite of this status is refused when it is read.
    status = config.get("quantization_status")
    checkpoint.require(status in ("compressed", "frozen"), f"with quantization_status {status}")
    for key, detail in _PLAIN.items():
        checkpoint.require(not config.get(key), f"with {detail}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    checkpoint.require(sparsity == "dense", f"with sparse weights ({sparsity})")
    groups = config.get("config_groups") or {}
    checkpoint.require(len(groups) == 1, f"with {len(groups)} config_groups instead of one")
    (group,) = groups.values()
    checkpoint.require(group.get("targets") == ["Linear"], f"with targets {group.get('targets')}")
    checkpoint.require(
        group.get("format") in (None, layout), f"with a group in the format {group.get('format')}"
    )
    checkpoint.require(not group.get("output_activations"), "with outputs quantised")
    _check_ignored(config.get("ignore") or [], checkpoint)
    checkpoint.require_plain()
    weights, inputs = _Scheme(group.get("weights")), _Scheme(group.get("input_activations"))
    return _FORMATS[layout](weights, inputs, checkpoint)


def _check_ignored(rules: list[str], checkpoint: Checkpoint) -> None:
    """Refuse ignore rules that LMDeploy cannot follow. A rule names layers that stay in floats.

    The rules must keep lm_head in floats, and must not keep a linear layer of the decoder in floats. As an exception,
    they may keep all linear layers of the decoder except the experts in floats (``_experts_alone``).
    """
    layers = _decoder_layers(checkpoint)
    alone = _experts_alone(rules, checkpoint)
    left = [name for name in layers if not alone and _ignores(rules, name)]
    named = [rule for rule in rules if not rule.startswith("re:") and rule not in layers]
    left += [rule for rule in named if rule.rpartition(".")[2] not in _NEVER_PACKED]
    checkpoint.require_packed(not left, "".join(left[:1]))
    checkpoint.require(_ignores(rules, "lm_head"), "with lm_head quantised")


def _decoder_layers(checkpoint: Checkpoint) -> list[str]:
    """Return the names that a decoder's linear layers may have in a checkpoint. A model may lack some of them."""
    layers = checkpoint.model.get("num_hidden_layers") or 1
    return [f"model.layers.{layer}.{name}" for layer in range(layers) for name in _LAYERS]


def _ignores(rules: list[str], name: str) -> bool:
    return any(re.match(rule[3:], name) if rule.startswith("re:") else rule == name for rule in rules)


def _experts_alone(rules: list[str], checkpoint: Checkpoint) -> bool:
    """Return whether only the experts are quantised, to 4 bits.

    The ignore rules must then keep all other linear layers in floats.
    """
    model = checkpoint.model
    if not checkpoint.has_experts or checkpoint.config.get("format") != "pack-quantized":
        return False
    has_dense = bool(model.get("mlp_only_layers")) or (model.get("decoder_sparse_step") or 1) > 1
    for name in _decoder_layers(checkpoint):
        is_expert = ".experts." in name
        exists = "self_attn" in name or is_expert or (has_dense and name.rpartition(".")[0].endswith("mlp"))
        if exists and _ignores(rules, name) == is_expert:
            return False
    return True


# --- weights of 4 bits


def _packed(weights: _Scheme, inputs: _Scheme, checkpoint: Checkpoint) -> Plan:
    checkpoint.require_served_experts()
    strategy, order = weights.get("strategy"), weights.get("actorder") or "static"
    is_served = weights.has(num_bits=4, type="int", dynamic=False) and strategy in ("group", "channel")
    checkpoint.require(is_served, f"with weights {weights}")
    checkpoint.require(not inputs, f"with inputs {inputs}")
    in_order = order in ("static", "weight")
    checkpoint.require(in_order, f"with actorder {order}, which groups inputs in another order")
    stored = stored_group(weights.get("group_size") if strategy == "group" else -1, checkpoint)
    symmetric = weights["symmetric"]
    if _experts_alone(checkpoint.config.get("ignore") or [], checkpoint):
        return plan_of_experts(stored, symmetric, checkpoint)
    return FourBits(checkpoint, stored, _WORDS, transposed=True, symmetric=symmetric).plan()


# --- weights and activations of 8 bits


def _int8(weights: _Scheme, inputs: _Scheme, checkpoint: Checkpoint) -> Plan:
    by_row = weights.has(num_bits=8, type="int", strategy="channel", symmetric=True)
    checkpoint.require(by_row, f"with weights {weights}")
    checkpoint.require(inputs.has(num_bits=8, type="int", **_TOKEN), f"with inputs {inputs}")
    config = checkpoint.named({"quant_method": "smooth_quant", "quant_dtype": "int8"})
    return Plan(config, _converter(checkpoint, "scale"))


def _float8(weights: _Scheme, inputs: _Scheme, checkpoint: Checkpoint) -> Plan:
    for part, scheme in (("weights", weights), ("inputs", inputs)):
        checkpoint.require(scheme.has(num_bits=8, type="float", symmetric=True), f"with {part} {scheme}")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy == "channel" and inputs.has(**_TOKEN):
        config = checkpoint.named({"quant_method": "smooth_quant", "quant_dtype": "float8_e4m3fn"})
        return Plan(config, _converter(checkpoint, "scale"))
    fp8 = checkpoint.named({"quant_method": "fp8", "fmt": "e4m3"})
    if strategy in ("tensor", "channel") and inputs.get("strategy") == "tensor" and not inputs.get("dynamic"):
        checkpoint.require(strategy == "tensor" or not checkpoint.has_experts, "with experts")
        return Plan(fp8 | {"activation_scheme": "static"}, _converter(checkpoint))
    by_block = strategy == "block" and list(block or ()) == [128, 128]
    by_group = inputs.has(strategy="group", group_size=128, dynamic=True)
    checkpoint.require(by_block and by_group, f"with weights {weights}, and inputs {inputs}")
    return Plan(fp8 | {"weight_block_size": [128, 128]}, _converter(checkpoint, "weight_scale_inv"))


def _converter(checkpoint: Checkpoint, scale: str | None = None) -> Convert:
    """Return a function that converts the tensors of 8-bit layers.

    scale: LMDeploy's name for ``weight_scale``. The converted scale gets this name and becomes float32. None keeps the
    scale's name and dtype, because layers with static input scales read them as stored.
    """
    input_scales: dict[int, Tensor] = {}  # identity of a layer -> the scale of its input

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        owner, _, part = name.rpartition(".")
        # LMDeploy would round an 8-bit router's values, and fails on a floating-point layer that it builds in 8 bits.
        is_router = part == "weight_scale" and owner.rpartition(".")[2] in _NEVER_PACKED
        checkpoint.require(not is_router, f"with {owner} quantised")
        if part == "weight" and layer is not None:
            checkpoint.require_packed(layer.weight.dtype.itemsize > 1 or tensor.dtype.itemsize == 1, owner)
        if part in ("weight_zero_point", "input_zero_point"):  # early releases store zeros
            checkpoint.require(not tensor.float().any(), f"with zero points in {name}")
        elif scale is not None and part == "weight_scale":
            yield f"{owner}.{scale}", tensor.float()
        else:
            if scale is None and part == "input_scale" and layer is not None:
                before = input_scales.setdefault(id(layer), tensor)
                is_shared = torch.equal(before.reshape(-1), tensor.reshape(-1))
                detail = (
                    f"with different scales for the input that {name} and the layers joined with it share"
                )
                checkpoint.require(is_shared, detail)
            yield name, tensor

    return convert


_FORMATS = {
    "pack-quantized": _packed,
    "int-quantized": _int8,
    "float-quantized": _float8,
    # Early releases used this name for both int-quantized and float-quantized.
    "naive-quantized": lambda weights, *rest: (_float8 if weights.has(type="float") else _int8)(
        weights, *rest
    ),
}
