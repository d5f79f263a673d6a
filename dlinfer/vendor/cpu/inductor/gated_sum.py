"""Recognise clusters that a C++ kernel computes: x + sigmoid(gate) * y, which adds a shared expert's result.

This sum stands between matrix products, so it has no neighbours to fuse with. As a cluster it would also end a chain
(``chains.py``), and calling its loops from Python would take longer than the work itself in a decode step."""

import torch
from torch import Tensor, fx

from dlinfer.graph.ir.dialect import fake, overload
from dlinfer.graph.ir.layout import is_contiguous, same_size, same_sizes
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor.fusible import NATIVE_FLOATS
from dlinfer.vendor.cpu.inductor.schedule import Cluster

CALLEE = "native gated_sum"

_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
_SIGMOID = torch.ops.aten.sigmoid.default


def gated_sum_of(cluster: Cluster) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return x, gate and y if a cluster is exactly x + sigmoid(gate) * y and the C++ kernel takes it; else None."""
    if len(cluster.body) != 3 or len(cluster.outputs) != 1 or native.why_not() is not None:
        return None
    (total,) = cluster.outputs
    of_total = _factors(total, _ADD, _MUL)
    of_product = None if of_total is None else _factors(of_total[1], _MUL, _SIGMOID)
    if of_total is None or of_product is None or {total, of_total[1], of_product[1]} != {*cluster.body}:
        return None
    x, y, gate = of_total[0], of_product[0], of_product[1].args[0]
    assert isinstance(gate, fx.Node)
    return (x, gate, y) if _fits(*map(fake, (total, x, gate, y))) else None


def _factors(node: fx.Node, op: object, of: object) -> tuple[fx.Node, fx.Node] | None:
    """Return the two operands of a node, such as y and sigmoid(gate) for mul(sigmoid(gate), y).

    The second is the operand that calls ``of``. Return None if the node does not call ``op`` on two nodes, or if
    neither of them calls ``of``.
    """
    if overload(node) is not op or node.kwargs or len(node.args) != 2:
        return None
    for plain, other in (node.args, node.args[::-1]):
        if isinstance(plain, fx.Node) and isinstance(other, fx.Node) and overload(other) is of:
            return plain, other
    return None


def _fits(total: Tensor, x: Tensor, gate: Tensor, y: Tensor) -> bool:
    row = x.shape[:-1]
    return (
        x.dtype in NATIVE_FLOATS
        and x.dtype is gate.dtype is y.dtype is total.dtype
        and x.dim() >= 1
        and same_sizes(y.shape, x.shape)
        and same_sizes(gate.shape[:-1], row)
        and gate.dim() == x.dim()
        and same_size(gate.shape[-1], 1)
        and is_contiguous(total)
    )
