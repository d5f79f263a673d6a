"""What a step calls for a node that is no loop: the vendor's kernel without the detour through the dispatcher."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dlinfer.graph import callee
from dlinfer.graph.dialect import overload
from dlinfer.ops import fallback
from dlinfer.ops.kernels import direct_kernel
from dlinfer.vendor.cpu import native

# The kernels in C++ take these over; they read weights as they lie in memory, so nothing is packed or copied.
_NATIVE = {"aten::linear": "linear", "dlinfer::linear": "linear", "dlinfer::linears": "linears"}


def callee_of(node: fx.Node) -> str:
    """The reference to what runs a node."""
    op = overload(node)
    if op is None:
        return callee.reference(node.target)
    name = op._schema.name
    if name in _NATIVE:
        return f"native {_NATIVE[name]}"
    if op.namespace == "dlinfer":
        return "vendor " + name.removeprefix("dlinfer::")
    return callee.reference(op)


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
    if reason is None:
        return getattr(torch.ops.dlinfer_cpu, name).default
    fallback.take(name, "cpu", f"the C++ kernels cannot be built: {reason}", ())
    return _linear if name == "linear" else direct_kernel(name, "cpu")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)
