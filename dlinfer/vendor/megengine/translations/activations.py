"""Translations of activations, and of dlinfer's gated activations."""

import math
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value
from dlinfer.vendor.megengine.translations.places import part
from dlinfer.vendor.megengine.translations.table import aten, ours, translation


@translation(aten.silu.default)
def _silu(writer: NodeList, result: Tensor, self: Value) -> Value:
    return writer.op("mul", self, writer.op("sigmoid", self, like=result), like=result)


@translation(aten.gelu.default)
def _gelu(writer: NodeList, result: Tensor, self: Value, approximate: str = "none") -> Value:
    if approximate == "none":
        return writer.op("gelu", self, like=result)
    cube = writer.op("mul", writer.op("mul", self, self, like=self), self, like=self)
    inner = writer.op("add", self, writer.op("mul", cube, 0.044715, like=self), like=self)
    curve = writer.op("tanh", writer.op("mul", inner, math.sqrt(2 / math.pi), like=self), like=self)
    half = writer.op("mul", self, 0.5, like=self)
    return writer.op("mul", half, writer.op("add", curve, 1.0, like=self), like=result)


@translation(aten.softmax.int, aten._softmax.default)
def _softmax(writer: NodeList, result: Tensor, self: Value, dim: int, **rest: Any) -> Value:
    if rest.get("dtype") not in (None, torch.float32):
        raise UntranslatableError("the softmax returns another dtype")
    return writer.op("softmax", self, like=result, axis=dim % len(self.shape))


@translation(ours.silu_mul.default)
def _silu_mul(writer: NodeList, result: Tensor, gate: Value, up: Value) -> Value:
    return writer.op("mul", _silu(writer, result, gate), up, like=result)


@translation(ours.silu_and_mul.default)
def _silu_and_mul(writer: NodeList, result: Tensor, x: Value) -> Value:
    size = x.shape[-1] // 2
    return _silu_mul(writer, result, *(part(writer, x, -1, start, start + size) for start in (0, size)))


@translation(ours.gelu_mul.default)
def _gelu_mul(writer: NodeList, result: Tensor, gate: Value, up: Value, tanh: bool) -> Value:
    return writer.op("mul", _gelu(writer, result, gate, "tanh" if tanh else "none"), up, like=result)
