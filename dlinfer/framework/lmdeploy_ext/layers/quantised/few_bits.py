"""Layers whose weights of int8 or int4 were packed while a model of any class was loading.

``conversion.formats`` rounds the numbers, to ``w8a8`` or ``awq-int4``. LMDeploy builds these layers for floats. So the
implementation of each layer holds its scales and zero points.
"""

import math
import re
from abc import abstractmethod
from typing import Any

import torch
from lmdeploy.pytorch.backends.linear import LinearImpl
from lmdeploy.pytorch.backends.moe import FusedMoEImpl
from lmdeploy.pytorch.backends.qmodules import LinearW8A8BuildSpec
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.conversion import floats
from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8, AwqInt4, Format
from dlinfer.framework.lmdeploy_ext.layers.quantised.eight_bit import LinearW8A8
from dlinfer.framework.lmdeploy_ext.layers.quantised.packing import Form, Weight
from dlinfer.ops.core.checks import FLOATS
from dlinfer.ops.quantised.packing import AWQ

_LANGUAGE = re.compile(r"(?!(?:.*\.)?(?:vis|audio|time_series))(?:.*\.)?layers\.\d+\..*")
"""Paths of a language model's layers, and not of a part for images, audio or time series."""

_ROUTERS = ("gate", "router", "shared_expert_gate", "weights_proj", "wk_weights_proj")
"""Small layers that choose experts or tokens. An error there changes the choice."""


def _registered(layer: nn.Module, weight: Weight) -> tuple[nn.Parameter, ...]:
    """Return what a packed weight has beside its numbers, as parameters of the layer: scales, and zero points."""
    _, *others = weight.packed
    parameters = tuple(nn.Parameter(tensor, requires_grad=False) for tensor in others)
    layer.packed_beside = nn.ParameterList(parameters)
    return parameters


class _Linear:
    """A linear layer. weight: what ``form`` packed. The packed numbers themselves are the layer's parameter."""

    form: Any

    def __init__(self, weight: Weight) -> None:
        self.form, self.dtype = weight.form, weight.dtype
        self.rows, self.columns = weight.rows, weight.columns
        self.others = _registered(weight.module, weight)

    def get_unquantized_weight(self, weight: Tensor) -> Tensor:
        """Return the unpacked weight, a new tensor [out_features, in_features]. weight: the packed numbers."""
        parts = (weight, *self.others)
        return self.form.unpack(parts, self.rows, self.columns, self.dtype)


class LinearInt8(_Linear, LinearImpl):
    """x @ weight.T + bias for int8 numbers and a scale for each row. x is quantised for each token."""

    def __init__(self, weight: Weight) -> None:
        super().__init__(weight)
        spec = LinearW8A8BuildSpec(weight.columns, weight.rows, False, weight.dtype, torch.int8)
        self.inner = LinearW8A8(spec)

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        *unused: Any,
        **more: Any,
    ) -> Tensor:
        """Return a new tensor [..., out] of the model's dtype. x: [..., in]. weight: int8 [out, in]. bias: [out]."""
        return self.inner.forward(x, weight, self.others[0], bias, all_reduce, group)


class LinearInt4(_Linear, LinearImpl):
    """x @ weight.T + bias for numbers of 4 bits in AWQ's layout."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        *unused: Any,
        **more: Any,
    ) -> Tensor:
        """Return a new tensor [..., out] of x's dtype. x: [..., in]. weight: int32 [in, out / 8]. bias: [out]."""
        scales, zeros = self.others
        parallel: dict[str, Any] = {"all_reduce": all_reduce, "group": group}
        size = self.form.group_size
        return ops.weight_quant_matmul(
            x, weight, scales, offset=zeros, bias=bias, group_size=size, **parallel
        )


class _Experts(FusedMoEImpl):
    """Gated experts with silu. The packed numbers of gate_up and of down are LMDeploy's parameters."""

    form: Any

    def __init__(self, layer: Any, gate_up: Weight, down: Weight) -> None:
        self.router = (layer.impl.top_k, layer.impl.renormalize)
        self.form = gate_up.form
        self.gate_up, self.down = (_registered(part.module, part) for part in (gate_up, down))

    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Any, *weights: Any, **more: Any
    ) -> Tensor:
        """Return a new tensor [N, hidden]. hidden_states: [N, hidden].

        weights: five arguments: the numbers of gate_up and of down; two biases, always None; the list of experts.
        """
        gate_up, down, gate_up_bias, down_bias, _ = weights
        others = (gate_up_bias, down_bias, more.get("act_func"))
        assert all(part is None for part in others), "those are not packed"
        parts = (gate_up, *self.gate_up, down, *self.down)
        return self.compute(hidden_states, *parts, topk_weights, topk_ids, *self.router)

    @abstractmethod
    def compute(self, *arguments: Any) -> Tensor:
        """Call the op and return its new tensor [N, hidden]. arguments: the op's own, up to ``renormalize``."""


class ExpertsInt8(_Experts):
    """Experts of int8 numbers [experts, out, in]. Their inputs are quantised for each token."""

    def compute(self, *arguments: Any) -> Tensor:
        return ops.fused_moe_w8a8(*arguments)


class ExpertsInt4(_Experts):
    """Experts of numbers of 4 bits, int32 [experts, in, out / 8]."""

    def compute(self, *arguments: Any) -> Tensor:
        return ops.fused_moe_w4a16(*arguments, self.form.group_size)


class FewBits(Form):
    """Rounds the linear layers and experts of the language model."""

    dtypes = FLOATS

    def admits(self, name: str) -> bool:
        return _LANGUAGE.fullmatch(name) is not None and name.rpartition(".")[2] not in _ROUTERS

    def _packed(self, form: Format, weight: Tensor, name: str) -> dict[str, Tensor]:
        """Quantise a weight [rows, columns] or [experts, rows, columns].

        Each expert is written into its place in the result, so the packed numbers are in memory only once.
        """
        if weight.ndim == 2:
            return floats.packed(self.setting, form, name, weight)
        experts, rows, columns = weight.shape
        parts = floats.empty_parts(form, rows, columns, experts)
        for expert, matrix in enumerate(weight):
            own = {part: stack[expert] for part, stack in parts.items()}
            floats.packed(self.setting, form, name, matrix, own)
        return parts


class Int8(FewBits):
    """A scale for each row: numbers [..., rows, columns] and scales [..., rows, 1]."""

    bits = "int8"
    linear_ops, experts_ops = ("dynamic_quant", "linear_w8a8"), ("fused_moe_w8a8",)

    def least_bytes(self, rows: int, columns: int) -> int | None:
        return rows * (columns + torch.float32.itemsize)

    def pack(self, weight: Tensor, name: str) -> tuple[Tensor, ...]:
        parts = self._packed(W8A8(), weight, name)
        return parts["weight"], parts["scale"]

    def unpack(self, parts: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        numbers, scales = parts
        plain = W8A8().dequantise(
            {"weight": numbers.reshape(rows, columns), "scale": scales.reshape(rows, 1)}
        )
        return plain.to(dtype)

    def linear(self, weight: Weight) -> Any:
        return LinearInt8(weight)

    def experts(self, layer: Any, gate_up: Weight, down: Weight) -> Any:
        return ExpertsInt8(layer, gate_up, down)


class Int4(FewBits):
    """AWQ's layout: a scale and a zero point for ``group_size`` neighbours of a row."""

    bits = "int4"
    linear_ops, experts_ops = ("weight_quant_matmul",), ("fused_moe_w4a16",)

    def __init__(self, group_size: int = floats.GROUP) -> None:
        self.group_size = group_size

    def of(self, *columns: int) -> "Int4":
        return Int4(math.gcd(self.group_size, *columns))

    def least_bytes(self, rows: int, columns: int) -> int | None:
        if self.group_size % AWQ.per_word or rows % AWQ.per_word:
            return None
        bits = columns * AWQ.bits + columns // self.group_size * (AWQ.bits + 16)
        return rows * bits // 8

    def pack(self, weight: Tensor, name: str) -> tuple[Tensor, ...]:
        parts = self._packed(AwqInt4(self.group_size), weight, name)
        return parts["qweight"], parts["scales"], parts["qzeros"]

    def unpack(self, parts: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        form, names = AwqInt4(self.group_size), ("qweight", "scales", "qzeros")
        matrices = zip(*parts, strict=True) if parts[0].ndim == 3 else [parts]
        plain = [form.dequantise(dict(zip(names, matrix, strict=True))) for matrix in matrices]
        return torch.cat(plain).to(dtype)

    def linear(self, weight: Weight) -> Any:
        return LinearInt4(weight)

    def experts(self, layer: Any, gate_up: Weight, down: Weight) -> Any:
        return ExpertsInt4(layer, gate_up, down)


FORMS = {form.bits: form for form in (Int8, Int4)}
"""Value of DLINFER_CPU_WEIGHTS -> its form."""
