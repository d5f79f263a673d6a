"""What a step calls for a node that is no loop: the vendor's kernel without the detour through the dispatcher."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir import callee
from dlinfer.graph.ir.dialect import arguments, fake, overload
from dlinfer.ops.kernels import direct_kernel
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor.fusible import ROUNDED_NORMS, is_rounded_norm

# The kernels in C++ take these over, norms in 16 bits only. They read weights as they lie in memory, so nothing is
# packed or copied.
_NATIVE = {
    "aten::linear": "linear",
    "dlinfer::linear": "linear",
    "dlinfer::linears": "linears",
    "dlinfer::weight_quant_matmul": "weight_quant_matmul",
    "dlinfer::rms_norm": "rms_norm",
    "dlinfer::add_rms_norm": "add_rms_norm",
}


def callee_of(node: fx.Node, *, native: bool = True) -> str:
    """The reference to what runs a node; without ``native``, where the kernels in C++ are not to be had."""
    op = overload(node)
    if op is None:
        return callee.reference(node.target)
    name = op._schema.name
    if native and name in _NATIVE and _is_native(node):
        return f"native {_NATIVE[name]}"
    if op.namespace == "dlinfer":
        return "vendor " + name.removeprefix("dlinfer::")
    return callee.reference(op)


def _is_native(node: fx.Node) -> bool:
    op = overload(node)
    if op in ROUNDED_NORMS:
        return is_rounded_norm(node)
    return op is not torch.ops.aten.linear.default or _is_plain_linear(node)


def _is_plain_linear(node: fx.Node) -> bool:
    """Whether an ``aten.linear`` is what the field means by it; torch takes a vector as weight, and any bias that
    broadcasts, of any dtype where there is nothing to multiply."""
    given = arguments(node)
    weight, bias = fake(given["weight"]), given.get("bias")
    tensors = [fake(given["input"]), weight, *([] if bias is None else [fake(bias)])]
    return (
        all(tensor.device.type == "cpu" and tensor.layout is torch.strided for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == 1
        and weight.dim() == 2
        and (bias is None or (fake(bias).dim() == 1 and str(fake(bias).shape[0]) == str(weight.shape[0])))
    )


def resolve(reference: str) -> Callable[..., Any]:
    """The function behind a reference of ``callee_of``."""
    kind, _, name = reference.partition(" ")
    if kind == "native":
        return _native(name)
    if kind == "vendor":
        return direct_kernel(name, "cpu")
    return callee.resolve(reference)


def _native(name: str) -> Callable[..., Any]:
    reason = native.why_not()
    if reason is not None:
        raise KeyError(f"native {name}: {reason}")
    return getattr(torch.ops.dlinfer_cpu, name).default
