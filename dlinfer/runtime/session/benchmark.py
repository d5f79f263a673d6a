"""Running again and again as fast as the engine goes: nothing is looked up, checked or converted in between."""

import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dlinfer.errors import SessionCallError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port
from dlinfer.runtime.session.running import RunningStage

USUAL_RUNS = 40


class BenchmarkResult(NamedTuple):
    """inf_completed runs in inf_time seconds, inf_rate runs a second; batch_size: the first input's first size."""

    inf_completed: int
    inf_rate: float
    inf_time: float
    batch_size: int


def benchmark(
    running: RunningStage, values: Sequence[Any], num_inferences: int | None, inf_time: float | None
) -> tuple[BenchmarkResult, "array[float]"]:
    """Return the result, and the latency of each run. One run before them is not counted.

    Raises SessionCallError where both limits are given, or one that is no positive number.
    """
    runs = _runs(num_inferences, inf_time)
    call, arguments = running.loaded.run, (*running.weights, *values)
    latencies = array("d")
    append, clock = latencies.append, time.perf_counter
    with running.lock, torch.no_grad():
        call(*arguments)
        start = last = clock()
        limit = inf_time if inf_time is not None else float("inf")
        # A difference, as inf_time is told: the sum of start and limit would be rounded.
        while len(latencies) < runs and last - start < limit:
            call(*arguments)
            now = clock()
            append(now - last)
            last = now
    seconds = last - start
    batch = next((value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim()), 1)
    return BenchmarkResult(len(latencies), len(latencies) / seconds, seconds, batch), latencies


def _runs(num_inferences: int | None, inf_time: float | None) -> float:
    if num_inferences is not None and inf_time is not None:
        detail = "num_inferences and inf_time exclude each other"
        raise SessionCallError(what="benchmark with", name="both limits", detail=detail)
    if inf_time is not None:
        if (
            isinstance(inf_time, bool)
            or not isinstance(inf_time, (int, float))
            or not 0 < inf_time < float("inf")
        ):
            detail = "it is a number of seconds above 0"
            raise SessionCallError(what="benchmark with inf_time", name=inf_time, detail=detail)
        return float("inf")
    runs = USUAL_RUNS if num_inferences is None else num_inferences
    if type(runs) is not int or runs < 1:
        detail = "it is a number of runs above 0"
        raise SessionCallError(what="benchmark with num_inferences", name=runs, detail=detail)
    return runs


def random_inputs(interface: Interface, seed: int = 0) -> dict[str, Any]:
    """Inputs of the sizes that the graph was compiled with: normal floats, integers of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: interface.usual(name) for name in interface.symbols}
    return {port.name: _random(port, sizes, generator) for port in interface.inputs}


def _random(port: Port, symbols: dict[str, int], generator: torch.Generator) -> Any:
    shape = [size.evaluate(symbols) for size in port.sizes if size is not None]
    if port.number:
        return shape[0]
    if port.dtype.is_floating_point or port.dtype.is_complex:
        made = torch.randn(shape, generator=generator).to(port.dtype)
    else:
        made = torch.randint(0, 2, shape, generator=generator).to(port.dtype)
    if port.strides is not None:
        strides = [stride.evaluate(symbols) for stride in port.strides]
        made = torch.empty_strided(shape, strides, dtype=port.dtype).copy_(made)
    return made.to(port.device)
