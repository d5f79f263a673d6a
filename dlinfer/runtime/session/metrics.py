"""Latencies of a session's inferences: recorded one by one, and summed up."""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

PERCENTILES = {"P25": 25.0, "P50": 50.0, "P75": 75.0, "P90": 90.0, "P99": 99.0, "P999": 99.9}
KEPT = 100_000
"""Percentiles are computed from this many of the latest latencies, which take about 3 MiB."""


class Metrics:
    """Latencies in seconds. Threads may record at once.

    Count, total, least and most are of all since ``clear``; percentiles are of the latest ``KEPT``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def __len__(self) -> int:
        return self._dropped + len(self._latest)

    def record(self, seconds: float) -> None:
        """Add the latency of one inference."""
        with self._lock:
            if len(self._latest) == KEPT:
                oldest = self._latest[0]
                self._dropped += 1
                self._dropped_seconds += oldest
                self._dropped_least = min(self._dropped_least, oldest)
                self._dropped_most = max(self._dropped_most, oldest)
            self._latest.append(seconds)

    def clear(self) -> None:
        """Forget everything that was recorded."""
        with self._lock:
            self._latest: deque[float] = deque(maxlen=KEPT)
            self._dropped, self._dropped_seconds = 0, 0.0
            self._dropped_least, self._dropped_most = float("inf"), float("-inf")

    def summary(self) -> dict[str, Any]:
        """num_of_inferences (int), min_latency, max_latency, P25 to P999, total_inference_time, avg_latency (s).

        The percentiles are numpy's, linear between the two latencies around the rank. With nothing recorded the
        total is 0.0 and what has no value is nan. The keys are those of Qualcomm's ``qaic.Session.get_metrics``.
        """
        with self._lock:
            seconds = np.array(self._latest, dtype=np.float64)
            count, total = self._dropped + seconds.size, self._dropped_seconds + float(seconds.sum())
            least, most = self._dropped_least, self._dropped_most
        if not seconds.size:
            least = most = mean = float("nan")
            ranks = [float("nan")] * len(PERCENTILES)
        else:
            least, most = min(least, float(seconds.min())), max(most, float(seconds.max()))
            mean = total / count if count > seconds.size else float(seconds.mean())
            ranks = np.percentile(seconds, list(PERCENTILES.values())).tolist()
        return {
            "num_of_inferences": int(count),
            "min_latency": least,
            "max_latency": most,
            **dict(zip(PERCENTILES, ranks, strict=True)),
            "total_inference_time": total,
            "avg_latency": mean,
        }


def table(summary: Mapping[str, float]) -> str:
    """Return the numbers for people, a line each, latencies in milliseconds."""
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
