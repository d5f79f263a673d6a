"""Comparing implementations on a machine that is not quiet: interleaved runs, medians, intervals.

Other load and the clock change from second to second and hit whatever runs just then. So the candidates take turns
within each round, and only ratios within a round are compared: ``interleave`` times, ``ratio`` compares, ``publish``
prints.
"""

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


def interleave(
    calls: Mapping[str, Callable[[], object]], pairs: int = 15, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each call, ``pairs`` samples a name; sample i of every name comes from the same round.

    Each round has another order (the same ones in every run), so that nobody always profits from what the same
    neighbour left in the caches. ``warmup`` rounds come first and are not kept.
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(0)
    for turn in range(-warmup, pairs):
        for name in draw.sample(names, len(names)):
            start = time.perf_counter()
            calls[name]()
            seconds = time.perf_counter() - start
            if turn >= 0:
                samples[name].append(seconds)
    return samples


class Ratio(NamedTuple):
    """A median ratio and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(samples_a: Sequence[float], samples_b: Sequence[float], resamples: int = 2000) -> Ratio:
    """The median of a / b over the rounds; with times, how often b fits into a. Both as ``interleave`` gives them.

    The interval is the percentile bootstrap of that median over whole rounds, reproducible by a fixed seed.
    """
    ratios = [a / b for a, b in zip(samples_a, samples_b, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]
    return Ratio(statistics.median(ratios), low, high)


def threads() -> int:
    """Threads that torch computes with here; peers get as many."""
    return torch.get_num_threads()


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "cpu": _cpu() or platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability()
        + (" AMX" if torch.cpu._is_amx_tile_supported() else ""),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    """The processor's name, with its family: some machines hide the rest of the name. "" where that is not told."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ""
    pairs = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    told = {name.strip(): value.strip() for name, _, value in reversed([*pairs])}
    name, family = told.get("model name", ""), told.get("cpu family", "")
    return f"{name}, family {family}" if name and family else name


def publish(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table, and then all of it as one line of JSON, which is the last line of the output."""
    info = machine()
    print(f"{title}, on {info['cpu']}, {info['threads']} threads, torch {info['torch']}")
    columns = list(rows[0]) if rows else []
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
    print(json.dumps({"benchmark": title, "machine": info, "rows": plain}))


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    return value._asdict() if isinstance(value, Ratio) else value
