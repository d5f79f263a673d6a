"""Record and summarize the latencies of a session's runs."""

import threading
from collections import deque
from collections.abc import Mapping

import numpy as np

PERCENTILES = {"P25": 25.0, "P50": 50.0, "P75": 75.0, "P90": 90.0, "P99": 99.0, "P999": 99.9}
KEPT = 100_000
"""Percentiles cover this many of the latest runs. The latencies of these runs take about 3 MiB."""


class Metrics:
    """Latencies in seconds. Several threads may record at once.

    Count, total, minimum and maximum cover all runs since ``clear``. Percentiles cover the latest ``KEPT`` runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def __len__(self) -> int:
        return self._count

    def record(self, seconds: float) -> None:
        with self._lock:
            self._count += 1
            self._total += seconds
            if seconds < self._least:
                self._least = seconds
            if seconds > self._most:
                self._most = seconds
            self._latest.append(seconds)

    def clear(self) -> None:
        with self._lock:
            self._latest: deque[float] = deque(maxlen=KEPT)
            self._count, self._total = 0, 0.0
            self._least, self._most = float("inf"), float("-inf")

    def summary(self) -> dict[str, float]:
        """Return num_of_inferences, min_latency, max_latency, P25 to P999, total_inference_time and avg_latency.

        Times are in seconds. Percentiles are interpolated linearly, as by ``numpy.percentile``. If nothing was
        recorded, the total is 0.0 and the latencies are nan. Qualcomm's
        ``qaic.Session.get_metrics`` returns the same keys.
        """
        with self._lock:
            seconds = np.array(self._latest, dtype=np.float64)
            count, total, least, most = self._count, self._total, self._least, self._most
        nan = float("nan")
        ranks = [nan] * len(PERCENTILES)
        if count:
            ranks = np.percentile(seconds, list(PERCENTILES.values())).tolist()
        return {
            "num_of_inferences": count,
            "min_latency": least if count else nan,
            "max_latency": most if count else nan,
            **dict(zip(PERCENTILES, ranks, strict=True)),
            "total_inference_time": total,
            "avg_latency": total / count if count else nan,
        }


def table(summary: Mapping[str, float]) -> str:
    """Return the summary as text, one number per line, latencies in milliseconds."""
    names = {
        "avg_latency": "Average latency (ms)",
        "min_latency": "Minimum latency (ms)",
        **{name: f"{name} latency (ms)" for name in PERCENTILES},
        "max_latency": "Maximum latency (ms)",
        "total_inference_time": "Total inference time (ms)",
    }
    lines = [f"{'Number of inferences':<28}{summary['num_of_inferences']:>14.0f}"]
    lines += [f"{text:<28}{summary[name] * 1e3:>14.4f}" for name, text in names.items()]
    return "\n".join(lines)
