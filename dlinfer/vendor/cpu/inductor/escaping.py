"""Put results that leave a region (part of a graph) into resizable memory, because the caller may resize it.

Large results that only pass from step to step come from a pool (csrc/common/result_memory.h). torch cannot resize the
pool's memory, but FSDP and memory savers free a tensor by ``untyped_storage().resize_(0)``."""

import math
from collections.abc import Sequence

import torch
from torch import fx

from dlinfer.graph.ir.dialect import memory_read, storages, tensors_of
from dlinfer.graph.ir.program import Step
from dlinfer.vendor.cpu import native

LOOPS_ESCAPE = "loops_escape"
"""The callee that switches inductor's loops from the pool to torch's memory, or back.

C++ kernels have another switch, which chains can call.
"""


def in_own_memory(graph: fx.Graph, steps: Sequence[Step]) -> list[Step]:
    """Return the steps, with two more around each step whose large results leave the region.

    The first new step makes results come from torch's memory; the second switches back to the pool. If a step raises
    outside a chain, the second does not run. Then this thread's results come from torch's memory until the next switch
    back. This costs only time."""
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
