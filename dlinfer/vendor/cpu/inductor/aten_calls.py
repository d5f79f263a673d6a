"""Choose the calls of torch's own ops that C++ kernels take over.

The C++ kernels serve only common cases. torch's ops also take vectors as weights, other dtypes, devices and layouts;
calls with these stay with torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.dialect import arguments, fake
from dlinfer.graph.ir.layout import is_contiguous, same_size, same_sizes
from dlinfer.vendor.cpu.inductor.fusible import NATIVE_FLOATS

_aten = torch.ops.aten
_WHOLE = (torch.int64, torch.int32)


def _is_plain_table(node: fx.Node) -> bool:
    """Return whether an ``aten.embedding`` reads a float table with dense rows, in host memory."""
    values = map_arg(arguments(node), fake)
    table, places = values["weight"], values["indices"]
    return (
        _is_here(table)
        and _is_here(places)
        and table.dtype in NATIVE_FLOATS
        and table.dim() == 2
        and same_size(table.stride(-1), 1)
        and places.dtype in (torch.int64, torch.int32)
    )


def _is_plain_linear(node: fx.Node) -> bool:
    """Return whether an ``aten.linear`` has a 2-D weight, a 1-D bias or none, and one dtype, all in host memory."""
    values = arguments(node)
    weight, bias = fake(values["weight"]), values.get("bias")
    tensors = [fake(values["input"]), weight, *([] if bias is None else [fake(bias)])]
    return (
        all(map(_is_here, tensors))
        and len({tensor.dtype for tensor in tensors}) == 1
        and weight.dim() == 2
        and (bias is None or (fake(bias).dim() == 1 and str(fake(bias).shape[0]) == str(weight.shape[0])))
    )


def _is_plain_attention(node: fx.Node) -> bool:
    """Return whether q, k and v are 4-D, of one float dtype and in host memory, without dropout.

    The C++ kernel checks masks itself.
    """
    values = map_arg(arguments(node), fake)
    read = [values[name] for name in ("query", "key", "value")]
    return (
        all(_is_here(tensor) and tensor.dim() == 4 for tensor in read)
        and len({tensor.dtype for tensor in read}) == 1
        and read[0].dtype in NATIVE_FLOATS
        and not values.get("dropout_p")
    )


def _is_plain_copy(node: fx.Node) -> bool:
    """Return whether an ``aten.index_copy_`` copies rows into a tensor of the rows' dtype and rank."""
    values = map_arg(arguments(node), fake)
    to, places, rows = values["self"], values["index"], values["source"]
    return (
        all(map(_is_here, (to, places, rows)))
        and to.dtype is rows.dtype
        and to.dim() == rows.dim() >= 1
        and places.dtype is torch.int64
        and places.dim() == 1
    )


def _is_sum_of_whole(node: fx.Node) -> bool:
    """Return whether an ``aten.add`` adds two integer tensors, and the second has the first's sizes or one element."""
    values = map_arg(arguments(node), fake)
    x, y = values["self"], values["other"]
    return (
        _is_one(values.get("alpha", 1))
        and isinstance(y, Tensor)
        and _is_here(x)
        and _is_here(y)
        and x.dtype is y.dtype
        and x.dtype in _WHOLE
        and (same_sizes(x.shape, y.shape) or (y.dim() <= x.dim() and all(same_size(n, 1) for n in y.shape)))
    )


def _adds_whole(node: fx.Node) -> bool:
    """Return whether an ``aten.add_`` adds a Python integer to a contiguous integer tensor."""
    values = map_arg(arguments(node), fake)
    x, y = values["self"], values["other"]
    return (
        _is_one(values.get("alpha", 1))
        and isinstance(y, (int, torch.SymInt))
        and not isinstance(y, bool)
        and _is_here(x)
        and x.dtype in _WHOLE
        and is_contiguous(x)
    )


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, int) and alpha == 1


def _is_here(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and in host memory."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


ATEN_CALLS: dict[Any, Callable[[fx.Node], bool]] = {
    _aten.add.Tensor: _is_sum_of_whole,
    _aten.add_.Tensor: _adds_whole,
    _aten.embedding.default: _is_plain_table,
    _aten.index_copy_.default: _is_plain_copy,
    _aten.linear.default: _is_plain_linear,
    _aten.scaled_dot_product_attention.default: _is_plain_attention,
}
"""Op of torch -> function that returns whether a C++ kernel serves a call of this op."""
