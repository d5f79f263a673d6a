"""Quantises a floating-point checkpoint at load time, if DLINFER_CPU_WEIGHTS or DLINFER_CPU_HEAD is set.

The packed numbers equal those that ``dlinfer quantise`` writes: AWQ for int4, W8A8 for int8. Each weight is packed
right after it is read, some rows at a time, so memory never holds more than one weight in floats.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import (
    CONVERTED_FROM,
    FLOATS,
    SERVED,
    Plan,
    language_configs,
    linear_sizes,
    shown,
)
from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8, AwqInt4, Format, pieces
from dlinfer.framework.lmdeploy_ext.conversion.model_files import DTYPES
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.ops.quantised.packing import AWQ

_DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
ADMITTED: Mapping[str, tuple[str, ...]] = {
    "int8": (*_DENSE, "MixtralForCausalLM"),  # LMDeploy's Qwen2-MoE and Qwen3-MoE have no int8 experts
    "int4": (*_DENSE, *SERVED, "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
}
"""Value of DLINFER_CPU_WEIGHTS -> architectures that LMDeploy builds quantised, with the tokens of such a checkpoint.

Other classes are packed in place (``layers.quantised.few_bits``).
"""

SETTING = "DLINFER_CPU_WEIGHTS"

GROUP = 128
"""The most inputs that share an int4 scale. The group is smaller if this number does not divide a model's sizes."""

_PIECE = 1 << 18
"""The most elements that are packed at once, unless ``ROWS`` rows have more. Packing takes 64 bits for each element."""

_PACKED = re.compile(
    r"model\.(?:language_model\.)?layers\.\d+\.(?:self_attn\.[qkvo]_proj"
    r"|linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(?:experts\.\d+\.|shared_expert\.)?(?:gate|up|down)_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123])\.weight"
)

_JOINED_EXPERTS = re.compile(r"(model\.language_model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj")
"""One tensor [experts, out, in] of all experts of a layer. Rows of gate come before rows of up."""

_TABLES = ("model.embed_tokens", "model.language_model.embed_tokens", "lm_head")
"""Layers that may be packed as a table, in checkpoints as in LMDeploy's models."""


def plan(bits: str, model: Mapping[str, Any]) -> Plan:
    """Return the plan that packs a floating-point model to int8 or int4.

    bits: ``int8`` or ``int4``. model: the contents of config.json, of an architecture that ``ADMITTED`` lists under
    ``bits``. Raises UnsupportedFeatureError for sizes that int4 cannot pack.
    """
    setting = f"{SETTING}={bits}"
    form = W8A8() if bits == "int8" else AwqInt4(_group(model))

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        for own, weight in _split_experts(name, tensor):
            if _PACKED.fullmatch(own) is None:
                yield own, weight
                continue
            owner = own.removesuffix("weight")
            for part, numbers in packed(setting, form, own, weight).items():
                yield f"{owner}{part}", numbers

    return Plan({**form.config(), CONVERTED_FROM: f"{FLOATS}, by {setting}"}, convert, packs=True)


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight [out, in]) for each expert's projections in a tensor of all experts; else the tensor."""
    joined = _JOINED_EXPERTS.fullmatch(name)
    if joined is None:
        yield name, tensor
        return
    parts = ("gate", "up") if joined[2] == "gate_up" else ("down",)
    for expert, own in enumerate(tensor):
        for part, weight in zip(parts, own.chunk(len(parts)), strict=True):
            yield f"{joined[1]}{expert}.{part}_proj.weight", weight


def _group(model: Mapping[str, Any]) -> int:
    """Return the int4 group size: the largest common divisor of ``GROUP`` and the sizes of a model's linear layers.

    Raises UnsupportedFeatureError if the result is not a multiple of 8. model: the contents of config.json.
    """
    sizes = linear_sizes(language_configs(model)[-1])
    group = math.gcd(GROUP, *sizes.values()) if sizes else 0
    if not group or group % AWQ.per_word:
        feature = (
            f"{SETTING}=int4 for sizes with no common divisor that {AWQ.per_word} divides ({shown(sizes)})"
        )
        raise refuse(feature, "set int8, which supports any size")
    return group


def empty_parts(form: Format, out_features: int, in_features: int, *stacked: int) -> dict[str, Tensor]:
    """Return uninitialised tensors for the parts of a packed weight of this size, as ``packed`` returns them.

    stacked: sizes of leading dimensions, such as the number of experts.
    """
    layout = form.parts(out_features, in_features).items()
    return {part: torch.empty((*stacked, *shape), dtype=DTYPES[dtype]) for part, (dtype, shape) in layout}


def packed(
    setting: str, form: Format, name: str, weight: Tensor, into: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Quantise a weight [out, in], and return the format's tensors: a dict from last part of the name to tensor.

    setting: the user's setting with its value, for error texts. name: the weight's name. into: the tensors to write,
    of the shapes that ``empty_parts`` returns; None for new ones. Raises UnsupportedFeatureError if the weight is not a
    floating-point matrix, or has values that are not finite or too large for the format.
    """
    feature = f"{setting} for {name}"
    if weight.ndim != 2 or not weight.is_floating_point() or weight.dtype.itemsize == 1:
        advice = "unset it, so that the checkpoint loads as it is stored"
        raise refuse(f"{feature} of {weight.dtype} and shape {list(weight.shape)}", advice)
    if fault := form.fault(*weight.shape):
        raise refuse(f"{feature}: {fault}", "set int8, which supports any size")
    parts = empty_parts(form, *weight.shape) if into is None else into
    begins = dict.fromkeys(parts, 0)
    for rows in pieces(weight, _PIECE):
        if not rows.isfinite().all():
            raise refuse(
                f"{feature}, which contains infinity or NaN,", "use a checkpoint with finite weights"
            )
        for part, numbers in form.quantise(rows).items():
            if numbers.is_floating_point() and not numbers.isfinite().all():
                raise refuse(f"{feature}, whose values are too large for its scales,", "set int8")
            size = numbers.shape[form.joined]
            parts[part].narrow(form.joined, begins[part], size).copy_(numbers)
            begins[part] += size
    return parts


def packed_head(
    weights: Iterable[tuple[str, Tensor]], model: torch.nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a weight file, with the output projection packed to int8 if ``model`` has it packed.

    If the output projection is tied to the embedding, the embedding is packed instead, and a stored output projection
    is left out. Raises UnsupportedFeatureError for a packed tensor with infinities or NaN.
    """
    parameters = {name for name, _ in model.named_parameters()}
    tables = [name for name in _TABLES if f"{name}.numbers" in parameters]
    for name, tensor in weights:
        owner = name.removesuffix(".weight")
        if owner in tables and owner != name:
            parts = packed("DLINFER_CPU_HEAD=int8", W8A8(), name, tensor)
            yield f"{owner}.numbers", parts["weight"]
            yield f"{owner}.scales", parts["scale"]
        elif name != "lm_head.weight" or not tables:
            yield name, tensor
