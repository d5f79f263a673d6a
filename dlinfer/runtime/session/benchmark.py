"""Run a stage repeatedly at the engine's full speed: nothing is looked up, checked or converted between runs."""

import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dlinfer.errors import SessionCallError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port
from dlinfer.runtime.artifact.loading import LoadedStage

USUAL_RUNS = 40


class BenchmarkResult(NamedTuple):
    """The result of a benchmark.

    inf_completed: the number of runs. inf_rate: runs per second. inf_time: seconds of all runs together.
    batch_size: the first dimension of the first input tensor.
    """

    inf_completed: int
    inf_rate: float
    inf_time: float
    batch_size: int


def benchmark(
    stage: LoadedStage, values: Sequence[object], num_inferences: int | None, inf_time: float | None
) -> tuple[BenchmarkResult, "array[float]"]:
    """Run a stage once to warm up, then repeatedly. Return the result, and the latency of each run in seconds.

    num_inferences: how many runs. inf_time: for how many seconds. If both are None, 40 runs. Raises SessionCallError if
    both are set, or if one is not a positive number.
    """
    runs = _runs(num_inferences, inf_time)
    limit = float("inf") if inf_time is None else inf_time
    call, arguments = stage.run, (*stage.weights, *values)
    latencies = array("d")
    append, clock = latencies.append, time.perf_counter
    with stage.lock, torch.no_grad():
        call(*arguments)
        start = last = clock()
        # Compare the elapsed time: the sum start + limit would be rounded.
        while len(latencies) < runs and last - start < limit:
            call(*arguments)
            now = clock()
            append(now - last)
            last = now
    seconds = last - start
    batch = next((value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim()), 1)
    return BenchmarkResult(len(latencies), len(latencies) / seconds, seconds, batch), latencies


def _runs(num_inferences: object, inf_time: object) -> float:
    """Return the number of runs; infinity if ``inf_time`` is the limit. Raises SessionCallError for wrong limits."""
    if inf_time is None:
        runs = USUAL_RUNS if num_inferences is None else num_inferences
        if type(runs) is int and runs >= 1:
            return runs
        what, value, detail = "benchmark: num_inferences", runs, "it must be a whole number of runs above 0"
    elif num_inferences is not None:
        what, value = "benchmark", "num_inferences and inf_time"
        detail = "pass either num_inferences or inf_time"
    else:
        if isinstance(inf_time, (int, float)) and type(inf_time) is not bool and 0 < inf_time < float("inf"):
            return float("inf")
        what, value, detail = "benchmark: inf_time", inf_time, "it must be a number of seconds above 0"
    raise SessionCallError(what=what, name=value, detail=detail)


def random_inputs(interface: Interface, seed: int = 0) -> dict[str, torch.Tensor | int]:
    """Return random inputs: normal floats, and integers 0 and 1.

    Each input has the size that it had in the example call at compilation.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: interface.usual(name) for name in interface.symbols}
    return {port.name: _random(port, sizes, generator) for port in interface.inputs}


def _random(port: Port, symbols: dict[str, int], generator: torch.Generator) -> torch.Tensor | int:
    shape: list[int] = [size.evaluate(symbols) for size in port.sizes if size is not None]
    if port.number:
        return shape[0]
    if port.dtype.is_floating_point or port.dtype.is_complex:
        values = torch.randn(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)
    strides = values.stride()
    if port.strides is not None:
        strides = [stride.evaluate(symbols) for stride in port.strides]
    return torch.empty_strided(shape, strides, dtype=port.dtype, device=port.device).copy_(values)
