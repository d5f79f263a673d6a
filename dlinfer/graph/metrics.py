"""Latencies of runs: how many, how long, and their percentiles (S3-27, S3-28)."""

import threading
from collections import deque
from collections.abc import Mapping

PERCENTILES = {"P25": 25.0, "P50": 50.0, "P75": 75.0, "P90": 90.0, "P99": 99.0, "P999": 99.9}

KEPT = 1_000_000
"""Percentiles are exact over as many of the latest runs; the other numbers over all."""


class Metrics:
    """Collects latencies in seconds; threads may add at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all runs."""
        with self._lock:
            self._latest: deque[float] = deque(maxlen=KEPT)
            self._count, self._total = 0, 0.0
            self._low, self._high = float("inf"), 0.0

    def add(self, seconds: float) -> None:
        """Count a run."""
        with self._lock:
            self._latest.append(seconds)
            self._count += 1
            self._total += seconds
            self._low = min(self._low, seconds)
            self._high = max(self._high, seconds)

    def summary(self) -> dict[str, float]:
        """The numbers of all runs, in seconds; zeros where there was none."""
        with self._lock:
            latest, count, total = sorted(self._latest), self._count, self._total
            low, high = (self._low, self._high) if count else (0.0, 0.0)
        found = {
            "num_of_inferences": count,
            "min_latency": low,
            "max_latency": high,
            "avg_latency": total / count if count else 0.0,
            "total_inference_time": total,
        }
        return found | {name: percentile(latest, share) for name, share in PERCENTILES.items()}


def percentile(ordered: list[float], share: float) -> float:
    """The percentile of ordered numbers, linear between two of them, as numpy.percentile gives it; 0 of none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * (share / 100)
    index = min(int(place), len(ordered) - 1)
    above = ordered[min(index + 1, len(ordered) - 1)]
    rest = place - index
    step = above - ordered[index]
    # numpy goes from the nearer of the two, and so do we: the last bit is the same
    return ordered[index] + step * rest if rest < 0.5 else above - step * (1 - rest)


def table(summary: Mapping[str, float]) -> str:
    """The numbers for people, a line each, latencies in milliseconds."""
    lines = [f"{'Number of inferences':<28}{summary['num_of_inferences']:>14.0f}"]
    names = {
        "avg_latency": "Average latency (ms)",
        "min_latency": "Minimum latency (ms)",
        **{name: f"{name} latency (ms)" for name in PERCENTILES},
        "max_latency": "Maximum latency (ms)",
    }
    lines += [f"{text:<28}{summary[name] * 1e3:>14.4f}" for name, text in names.items()]
    lines.append(f"{'Total inference time (ms)':<28}{summary['total_inference_time'] * 1e3:>14.4f}")
    return "\n".join(lines)
