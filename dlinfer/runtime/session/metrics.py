"""Latencies of a session's inferences: recorded one by one, summed up exactly."""

from collections.abc import Mapping
from typing import Any

import numpy as np

PERCENTILES = {"P25": 25.0, "P50": 50.0, "P75": 75.0, "P90": 90.0, "P99": 99.0, "P999": 99.9}


class Metrics:
    """Latencies in seconds. Threads may record at once.

    Every latency is kept, so that the percentiles are exact: about 32 bytes an inference, until ``clear``.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._seconds)

    def record(self, seconds: float) -> None:
        """Add the latency of one inference."""
        self._seconds.append(seconds)

    def clear(self) -> None:
        """Forget everything that was recorded."""
        self._seconds.clear()

    def summary(self) -> dict[str, Any]:
        """num_of_inferences (int), min_latency, max_latency, P25 to P999, total_inference_time, avg_latency (s).

        The percentiles are numpy's, linear between the two latencies around the rank. With nothing recorded the
        total is 0.0 and what has no value is nan. The keys are those of Qualcomm's ``qaic.Session.get_metrics``.
        """
        seconds = np.array(self._seconds.copy(), dtype=np.float64)
        if not seconds.size:
            least = most = mean = float("nan")
            ranks = [float("nan")] * len(PERCENTILES)
        else:
            least, most, mean = float(seconds.min()), float(seconds.max()), float(seconds.mean())
            ranks = np.percentile(seconds, list(PERCENTILES.values())).tolist()
        return {
            "num_of_inferences": int(seconds.size),
            "min_latency": least,
            "max_latency": most,
            **dict(zip(PERCENTILES, ranks, strict=True)),
            "total_inference_time": float(seconds.sum()),
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
