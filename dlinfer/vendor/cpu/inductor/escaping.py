"""Put results that leave a region into torch's own memory, since the code that gets them may resize it.

Large results between two steps come from a pool (csrc/common/result_memory.h). torch cannot resize the pool's memory,
but FSDP and memory savers free a tensor by ``untyped_storage().resize_(0)``."""

import math
from collections.abc import Sequence

import torch
from torch import fx

from dlinfer.graph.ir.dialect import memory_read, storages, tensors_of
from dlinfer.graph.ir.program import Step
from dlinfer.vendor.cpu import native

LOOPS_ESCAPE = "loops_escape"
"""The callee that switches loops between pool and torch's memory. Kernels have a switch that chains can call."""


def in_own_memory(graph: fx.Graph, steps: Sequence[Step]) -> list[Step]:
    """Return the steps, with a switch to torch's memory around each one whose large results leave the region.

    A step that raises outside a chain leaves the switch on until its thread runs the next such step. Until then all
    results come from torch's memory, which only takes longer."""
    if native.why_not() is not None:
        return list(steps)
    leaving = {memory for node in graph.output_node().all_input_nodes for memory in storages(node)}
    names = {
        node.name
        for node in graph.nodes
        if node.op == "call_function"
        and not leaving.isdisjoint(storages(node) - memory_read(node))
        and any(map(_may_be_large, tensors_of(node)))
    }
    switched: list[Step] = []
    for number, step in enumerate(steps):
        if step.callee.startswith("op ") or names.isdisjoint(step.names):
            switched.append(step)
        else:
            callee = LOOPS_ESCAPE if step.kind == "cluster" else "native results_escape"
            switched.append(Step(f"escapes_{number}_on", "size", callee, (True,), {}, ""))
            switched.append(step)
            switched.append(Step(f"escapes_{number}_off", "size", callee, (False,), {}, ""))
    return switched


def _may_be_large(tensor: torch.Tensor) -> bool:
    sizes = tensor.shape
    return not all(isinstance(size, int) for size in sizes) or (
        math.prod(sizes) * tensor.dtype.itemsize >= native.LEAST_POOLED
    )
