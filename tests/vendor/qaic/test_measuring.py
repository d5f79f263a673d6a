"""Metrics, their eleven lines, and the profile table."""

import cProfile
import re
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from dlinfer.vendor.qaic import Session, profile
from dlinfer.vendor.qaic.errors import QaicMetricsError, QaicOptionError
from tests.vendor.qaic import models

DATA = {"data": np.ones((2, 8), np.float32)}
NAMES = "num_of_inferences min_latency max_latency P25 P50 P75 P90 P99 P999 total_inference_time avg_latency".split()
# The guide's sample output, its numbers as patterns.
LINES = [
    r"Number of inferences utilized for calculation are 20",
    r"Minimum latency observed NUMBER s",
    r"Maximum latency observed NUMBER s",
    r"Average latency / inference time observed is NUMBER s",
    r"P25 / 25% of inferences observed latency less than NUMBER s",
    r"P50 / 50% of inferences observed latency less than NUMBER s",
    r"P75 / 75% of inferences observed latency less than NUMBER s",
    r"P90 / 90% of inferences observed latency less than NUMBER s",
    r"P99 / 99% of inferences observed latency less than NUMBER s",
    r"Sum of all the inference times NUMBER s",
    r"Average latency / inference time observed is NUMBER s",
]
NUMBER = r"(\d+\.\d+(?:e-\d+)?|\d+e-\d+)"


def session_of(linear, backend: str = "onnxruntime", **options: Any) -> Session:
    return Session(linear, backend=backend, onnx_define_symbol={"batch": 2}, **options)


@pytest.mark.parametrize("backend", ["aic", "onnxruntime"])
@pytest.mark.parametrize("option", ["enable_metrics", "enable_profiling"])
def test_metrics_are_numpys_percentiles_of_the_runs(linear, stand_in, backend, option, monkeypatch):
    session = session_of(linear, backend, **{option: True})
    times = iter(np.cumsum(np.random.default_rng(0).random(100)))
    # The module's own clock, not everybody's: another thread of the process may look at that.
    monkeypatch.setattr("dlinfer.vendor.qaic.session.time", SimpleNamespace(perf_counter=lambda: next(times)))
    expected = np.diff(list(np.cumsum(np.random.default_rng(0).random(100))))[::2]
    for _ in range(50):
        session.run(DATA)
    metrics = session.get_metrics()
    assert list(metrics) == NAMES
    assert type(metrics["num_of_inferences"]) is int
    assert metrics["num_of_inferences"] == 50
    for name, rank in (("P25", 25), ("P50", 50), ("P75", 75), ("P90", 90), ("P99", 99), ("P999", 99.9)):
        assert metrics[name] == np.percentile(expected, rank)
    assert metrics["min_latency"] == expected.min()
    assert metrics["max_latency"] == expected.max()
    assert metrics["total_inference_time"] == pytest.approx(expected.sum(), rel=1e-12)
    assert metrics["avg_latency"] == pytest.approx(expected.mean(), rel=1e-12)


def test_percentiles_rise_unlike_in_the_guides_sample(linear):
    """The sample shows P90 above P99, which no latencies have."""
    session = session_of(linear, enable_metrics=True)
    for _ in range(200):
        session.run(DATA)
    metrics = session.get_metrics()
    ranks = [
        metrics[name] for name in ("min_latency", "P25", "P50", "P75", "P90", "P99", "P999", "max_latency")
    ]
    assert ranks == sorted(ranks)


def test_refused_runs_and_benchmarks_are_not_counted(linear):
    session = session_of(linear, enable_metrics=True)
    session.run(DATA)
    with pytest.raises(ValueError, match="input"):
        session.run({})
    session.run_benchmark(num_inferences=3)
    assert session.get_metrics()["num_of_inferences"] == 1


def test_before_any_run_there_is_a_count(linear):
    assert session_of(linear, enable_metrics=True).get_metrics()["num_of_inferences"] == 0


@pytest.mark.parametrize("option", ["enable_metrics", "enable_profiling"])
def test_the_eleven_lines(linear, capsys, option):
    session = session_of(linear, "onnxruntime", **{option: True})
    for _ in range(20):
        session.run(DATA)
    assert session.print_metrics() is None
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(LINES) == 11
    for line, pattern in zip(printed, LINES, strict=True):
        assert re.fullmatch(pattern.replace("NUMBER", NUMBER), line), line
    assert printed[3] == printed[10]
    assert not any("P999" in line for line in printed)
    assert printed[1] == f"Minimum latency observed {session.get_metrics()['min_latency']} s"


@pytest.mark.parametrize("call", ["get_metrics", "print_metrics"])
def test_without_the_option_there_are_none(linear, call):
    session = session_of(linear, enable_metrics=False)
    session.run(DATA)
    with pytest.raises(QaicMetricsError, match="without enable_metrics=True or enable_profiling=True"):
        getattr(session, call)()


def loses_callers(model: str) -> bool:
    """Return whether this CPython's cProfile forgets functions that call an extension's, as 3.12.1 and 3.13.0 do."""
    session = onnxruntime.InferenceSession(model)
    (name,) = (given.name for given in session.get_inputs())
    data = DATA["data"]

    def caller() -> None:
        session.run(None, {name: data})

    recorded = cProfile.Profile()
    recorded.runcall(caller)
    recorded.create_stats()
    return not any(function == "caller" for _, _, function in recorded.stats)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("backend", ["aic", "onnxruntime"])
def test_profile_of_the_first_runs(linear, stand_in, capsys, backend):
    session = session_of(linear, backend, enable_profiling=True)
    for _ in range(3):
        session.run(DATA)
    assert session.print_profile_data(n=2) is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  File-Line-Function  | |  num calls  | |  func time  | |  tot time  |"
    assert lines.count(lines[0]) == 2
    assert set(lines[1::2]) == {""}
    rows = [line for line in lines[::2] if line != lines[0]]
    for row in rows:
        match = re.fullmatch(r"(\(.*, \d+, .*\)) (\d+) (\S+) (\S+)", row)
        assert match, row
        own, total = float(match[3]), float(match[4])
        assert int(match[2]) >= 1
        assert 0 <= own <= total + 1e-9
    assert not any("_lsprof" in row for row in rows)
    if loses_callers(str(linear)):
        pytest.skip("this CPython's cProfile forgets functions that call an extension's")
    assert any("onnxruntime_inference_collection.py" in row and "'run'" in row for row in rows)


def test_more_than_there_were_is_all_there_were(linear, capsys):
    session = session_of(linear, enable_profiling=True)
    session.run(DATA)
    session.print_profile_data(5)
    assert capsys.readouterr().out.count("|  File-Line-Function  |") == 1


@pytest.mark.parametrize("options", [{}, {"enable_metrics": True}])
def test_without_the_option_there_is_none(linear, options: dict[str, Any]):
    with pytest.raises(QaicMetricsError, match="without enable_profiling=True"):
        session_of(linear, "onnxruntime", **options).print_profile_data(1)


@pytest.mark.parametrize("n", [0, -1, 1.5, "1", None, True])
def test_n_is_a_count(linear, n):
    with pytest.raises(QaicOptionError, match=r"n=.*an int of at least 1"):
        session_of(linear, enable_profiling=True).print_profile_data(n)


def test_profiled_runs_are_bounded_and_later_ones_still_run(linear, monkeypatch):
    monkeypatch.setattr(profile, "KEPT_RUNS", 2)
    session = session_of(linear, enable_profiling=True)
    for _ in range(4):
        np.testing.assert_allclose(
            session.run(DATA)["output"], models.oracle(DATA["data"]), rtol=1e-5, atol=1e-6
        )
    assert session.get_metrics()["num_of_inferences"] == 4
    assert session._profiler is not None
    assert len(session._profiler.runs) == 2


def test_threads_profile_by_turns(linear):
    """Those of two sessions too: Python has one profiler."""
    sessions = [session_of(linear, enable_profiling=True) for _ in range(2)]
    threads = [threading.Thread(target=sessions[turn % 2].run, args=(DATA,)) for turn in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        assert session._profiler is not None
        assert len(session._profiler.runs) == 8
        assert all(rows for rows in session._profiler.runs)
