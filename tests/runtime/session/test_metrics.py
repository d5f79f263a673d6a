"""Latency metrics: numpy.percentile of what was recorded, from any number of threads, in bounded memory."""

import itertools
import math
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlinfer.runtime.session import metrics as module
from dlinfer.runtime.session.metrics import Metrics

KEYS = (
    "num_of_inferences min_latency max_latency P25 P50 P75 P90 P99 P999 total_inference_time avg_latency"
).split()


# Machines that do much else besides draw and run slowly.
slowly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def recorded(latencies: list[float]) -> Metrics:
    metrics = Metrics()
    for seconds in latencies:
        metrics.record(seconds)
    return metrics


@slowly
@given(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=300))
def test_the_summary_is_numpys_u8(latencies):
    summary = recorded(latencies).summary()
    assert list(summary) == KEYS
    assert summary["num_of_inferences"] == len(latencies)
    for name, rank in (("P25", 25), ("P50", 50), ("P75", 75), ("P90", 90), ("P99", 99), ("P999", 99.9)):
        assert summary[name] == np.percentile(latencies, rank)
    assert (summary["min_latency"], summary["max_latency"]) == (min(latencies), max(latencies))
    # Summation orders differ: float64 sums of up to 300 numbers agree to some 300 roundings.
    assert summary["total_inference_time"] == pytest.approx(math.fsum(latencies), rel=1e-13)
    assert summary["avg_latency"] == pytest.approx(math.fsum(latencies) / len(latencies), rel=1e-13)


@slowly
@given(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=100))
def test_percentiles_rise_with_their_rank(latencies):
    summary = recorded(latencies).summary()
    ranks = [
        summary[name] for name in ("min_latency", "P25", "P50", "P75", "P90", "P99", "P999", "max_latency")
    ]
    # One unit in the last place: numpy interpolates between equal neighbours in floating point.
    assert all(low <= high * (1 + 2**-51) for low, high in itertools.pairwise(ranks))


def test_a_long_run_keeps_the_latest_for_percentiles_and_sums_up_all(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 10)
    latencies = [100.0, 0.001, *(1.0 + n for n in range(20))]
    metrics = recorded(latencies)
    summary = metrics.summary()
    assert (len(metrics), summary["num_of_inferences"], len(metrics._latest)) == (22, 22, 10)
    assert (summary["min_latency"], summary["max_latency"]) == (0.001, 100.0)
    assert summary["P50"] == np.percentile(latencies[-10:], 50)
    assert summary["total_inference_time"] == pytest.approx(math.fsum(latencies), rel=1e-13)
    assert summary["avg_latency"] == pytest.approx(math.fsum(latencies) / 22, rel=1e-13)
    metrics.clear()
    assert (len(metrics), metrics.summary()["total_inference_time"]) == (0, 0.0)


def test_numbers_are_python_numbers():
    summary = recorded([0.5, 0.25]).summary()
    assert type(summary.pop("num_of_inferences")) is int
    assert {type(value) for value in summary.values()} == {float}


def test_nothing_recorded_has_a_count_and_no_latency():
    summary = Metrics().summary()
    assert list(summary) == KEYS
    assert (summary["num_of_inferences"], summary["total_inference_time"]) == (0, 0.0)
    assert all(math.isnan(summary[name]) for name in KEYS if name not in ("num_of_inferences", KEYS[-2]))


def test_threads_record_without_loss_and_may_sum_up_meanwhile():
    metrics = Metrics()

    def work() -> None:
        for _ in range(1000):
            metrics.record(0.001)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert metrics.summary()["num_of_inferences"] <= 8000
    assert metrics.summary()["num_of_inferences"] == len(metrics) == 8000


def test_clear_starts_anew():
    metrics = recorded([1.0, 2.0])
    metrics.clear()
    metrics.record(3.0)
    assert metrics.summary()["P50"] == 3.0
