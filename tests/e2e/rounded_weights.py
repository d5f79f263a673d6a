"""Rounds the weights of a model in floats to the values that int8 and int4 keep: the oracle of packed weights."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8, AwqInt4, Format
from dlinfer.framework.lmdeploy_ext.layers.quantised import few_bits, packable


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _form(bits: str, *inputs: int) -> Format:
    return W8A8() if bits == "int8" else AwqInt4(math.gcd(128, *inputs))


def _values(form: Format, weight: Tensor) -> Tensor:
    return form.dequantise(form.quantise(weight)).to(weight.dtype).contiguous()


@torch.inference_mode()
def round_weights(model: nn.Module, bits: str) -> int:
    """Round the weights of the language model's layers and experts, and return how many they are.

    A weight gets a new tensor, since a kernel may have packed the old one already.
    """
    names = {id(module): name for name, module in model.named_modules()}
    count = 0
    for layer in packable.layers(model, _is_float):
        if few_bits.FORMS[bits]().admits(names[id(layer)]):
            layer.weight.data = _values(_form(bits, layer.weight.shape[1]), layer.weight)
            count += 1
    for layer in packable.experts(model, _is_float):
        parts: list[Any] = [layer.gate_up, layer.down]
        form = _form(bits, *(part.weight.shape[-1] for part in parts))
        for part in parts:
            part.weight.data = torch.stack([_values(form, one) for one in part.weight])
            count += 1
    for module in model.modules():
        if hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()  # latent attention makes two weights from one
    return count
