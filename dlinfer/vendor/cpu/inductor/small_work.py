"""Run clusters with little work on one thread, which finishes before other threads would have begun.

Inductor's loops over a varying number of rows use all threads, with a barrier after each loop. In a decode step a
cluster has a few microseconds of work, and starting and joining threads takes several times that. So a cluster's work
is expressed once, as a function of the size of one input. The calling thread then runs small calls alone."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake, is_view
from dlinfer.graph.torch_private.symbols import fixed_size, multiple_of

MOST = 1 << 18
"""The most elements that all loops of a call compute on one thread: about 15 microseconds of work."""


@dataclass(frozen=True)
class Measure:
    """The rule for a cluster's work: a call has little work if its input ``index`` has at most ``most`` elements."""

    index: int
    most: int


def measure_of(graph: fx.GraphModule) -> Measure | None:
    """Return the rule for a decomposed graph; None if its work is always large, or depends on several inputs."""
    counts = [
        value.numel()
        for node in graph.graph.nodes
        if node.op == "call_function" and isinstance(value := fake(node), torch.Tensor) and not is_view(node)
    ]
    fixed = sum(count for count in counts if fixed_size(count) is not None)
    growing = [count for count in counts if fixed_size(count) is None]
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = fake(node)
        if fixed > MOST or not isinstance(value, torch.Tensor):
            continue
        times = [multiple_of(count, value.numel()) for count in growing]
        if None not in times:
            total: float = sum(filter(None, times))
            return Measure(index, int((MOST - fixed) / total) if total else torch.iinfo(torch.int64).max)
    return None


def by_one_thread(run: Callable[..., Any], measure: Measure | None) -> Callable[..., Any]:
    """Wrap a compiled cluster so that its calls with little work run on the calling thread alone."""
    set_threads = _set_threads()
    if measure is None or set_threads is None:
        return run
    index, most = measure.index, measure.most

    def called(*inputs: Any) -> Any:
        if inputs[index].numel() > most:
            return run(*inputs)
        before = torch.get_num_threads()
        set_threads(1)  # for this thread alone, which runs only this cluster
        try:
            return run(*inputs)
        finally:
            set_threads(before)

    return called


@functools.cache
def _set_threads() -> Callable[[int], None] | None:
    """Return OpenMP's function that sets the number of threads for the calling thread.

    None if that function cannot be found, or does not control torch's threads. torch.set_num_threads is no substitute:
    it sets the number only for threads that have not yet asked for it."""
    try:
        setter = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return None
    setter.argtypes, setter.restype = [ctypes.c_int], None
    before = torch.get_num_threads()
    setter(before + 1)
    heard = torch.get_num_threads() == before + 1
    setter(before)
    return setter if heard else None
