"""Lets a model compute in floats, with weights and inputs rounded as int8 and int4 do: the oracle of packed ones."""

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


def _rounded(x: Tensor) -> Tensor:
    """The values of int8 with a scale for each token."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round().clamp(-127, 127) * scale


class _OfRoundedInputs:
    """A linear layer whose input is rounded. inner: its implementation in floats."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, x: Tensor, *rest: Any, **more: Any) -> Tensor:
        return self.inner.forward(_rounded(x), *rest, **more)


class _ExpertsOfRoundedInputs:
    """Gated experts with silu, one token after the other. Both projections' inputs are rounded."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def forward(
        self, x: Tensor, shares: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, *rest: Any, **more: Any
    ) -> Tensor:
        if self.inner.renormalize:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for token, chosen in enumerate(ids.tolist()):
            for place, expert in enumerate(chosen):
                gate, up = (_rounded(x[token]) @ gate_up[expert].t()).chunk(2, -1)
                inside = _rounded(torch.nn.functional.silu(gate) * up)
                out[token] += shares[token, place] * (inside @ down[expert].t())
        return out


@torch.inference_mode()
def round_weights(model: nn.Module, bits: str) -> int:
    """Round the weights of the language model's layers and experts, and return how many they are.

    With int8 the inputs of these layers are rounded too. A weight gets a new tensor, since a kernel may have packed the
    old one already.
    """
    names = {id(module): name for name, module in model.named_modules()}
    count = 0
    for layer in packable.layers(model, _is_float):
        if few_bits.FORMS[bits]().admits(names[id(layer)]):
            layer.weight.data = _values(_form(bits, layer.weight.shape[1]), layer.weight)
            if bits == "int8":
                layer.impl = _OfRoundedInputs(layer.impl)
            count += 1
    for layer in packable.experts(model, _is_float):
        parts: list[Any] = [layer.gate_up, layer.down]
        form = _form(bits, *(part.weight.shape[-1] for part in parts))
        for part in parts:
            part.weight.data = torch.stack([_values(form, one) for one in part.weight])
            count += 1
        if bits == "int8":
            layer.impl = _ExpertsOfRoundedInputs(layer.impl)
    for module in model.modules():
        after: Any = getattr(module, "process_weights_after_loading", None)
        if after is not None:
            after()  # latent attention makes two weights from one
    return count
