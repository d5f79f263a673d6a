"""What a session measures: metrics, benchmarks, profiles."""

import gc
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import dlinfer
from dlinfer.errors import SessionCallError
from dlinfer.runtime.session.benchmark import benchmark
from tests.runtime.artifact.artifact_files import compiled_head, rows, saved, use_stub


@pytest.fixture
def path(tmp_path, monkeypatch):
    use_stub(monkeypatch)
    return saved(compiled_head()[1], tmp_path / "a.dlinfer")


def test_metrics_are_numpys_percentiles_of_the_runs(path):
    session = dlinfer.load(path)
    for _ in range(50):
        session.run({"x": rows(3)})
    found = session.get_metrics()
    seconds = np.array(session.metrics._latest)
    assert found["num_of_inferences"] == len(seconds) == 50
    for name, rank in {"P25": 25, "P50": 50, "P75": 75, "P90": 90, "P99": 99, "P999": 99.9}.items():
        assert found[name] == np.percentile(seconds, rank)
    assert (found["min_latency"], found["max_latency"]) == (seconds.min(), seconds.max())
    assert found["avg_latency"] == pytest.approx(seconds.mean())


def test_metrics_may_be_off(path, capsys):
    session = dlinfer.load(path, options={"enable_metrics": False})
    session.run({"x": rows(3)})
    assert session.get_metrics()["num_of_inferences"] == 0
    with pytest.raises(SessionCallError, match="enable_metrics"):
        session.print_metrics()
    session.update_backend_options(enable_metrics=True)
    session.run({"x": rows(3)})
    session.print_metrics()
    assert "P999 latency (ms)" in capsys.readouterr().out


def test_a_benchmark_of_so_many_runs(path):
    session = dlinfer.load(path)
    found = session.run_benchmark(num_inferences=25, input_dict={"x": rows(7)})
    assert (found.inf_completed, found.batch_size) == (25, 7)
    assert found.inf_rate == pytest.approx(25 / found.inf_time)
    assert session.get_metrics()["num_of_inferences"] == 25
    assert session.run_benchmark().inf_completed == 40


def test_a_benchmark_of_so_many_seconds(path):
    found = dlinfer.load(path).run_benchmark(inf_time=0.05)
    assert found.inf_completed > 0
    assert found.inf_time >= 0.05


def test_a_benchmark_never_ends_before_its_time(path, monkeypatch):
    """Where the sum of start and time rounds down, a clock that shows this sum shows too little time."""
    start = next(start for start in range(1, 100) if start + 0.1 - start < 0.1)
    times = iter([float(start), start + 0.1, math.nextafter(start + 0.1, math.inf), start + 1.0])
    monkeypatch.setattr(
        "dlinfer.runtime.session.benchmark.time", SimpleNamespace(perf_counter=lambda: next(times))
    )
    found = dlinfer.load(path).run_benchmark(inf_time=0.1)
    assert found.inf_completed == 2
    assert found.inf_time >= 0.1


@pytest.mark.parametrize(
    "limits",
    [
        {"num_inferences": 0},
        {"num_inferences": -1},
        {"num_inferences": 1.5},
        {"num_inferences": True},
        {"inf_time": 0},
        {"inf_time": float("nan")},
        {"inf_time": float("inf")},
        {"inf_time": "1"},
        {"num_inferences": 3, "inf_time": 1.0},
    ],
)
def test_invalid_limits_are_refused(path, limits):
    with pytest.raises(SessionCallError, match="benchmark"):
        dlinfer.load(path).run_benchmark(**limits)


def test_a_benchmark_calls_the_engine_and_nothing_else(path):
    """Its loop is Python's own: per run one call of what the engine made. What that costs: benchmarks.session."""
    session = dlinfer.load(path)
    session.setup()
    [[running]] = session._running.values()
    called = []

    def follow(frame, event, argument):
        if event == "call" and frame.f_back is not None and frame.f_back.f_code is benchmark.__code__:
            called.append(frame.f_code)

    values = [rows(3)]
    collects = gc.isenabled()
    gc.disable()  # what other tests left behind would be finalised in the midst, by calls from the same frame
    sys.setprofile(follow)
    try:
        benchmark(running, values, 25, None)
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    per_run = [code for code in set(called) if called.count(code) >= 25]
    assert len(per_run) == 1
    assert called.count(per_run[0]) == 26  # one before them is not counted


def test_every_op_is_timed(path, tmp_path):
    """The regions' own steps and what runs between them."""
    rows_ = dlinfer.load(path).profile_ops({"x": rows(3)}, path=tmp_path / "ops.json")
    assert [row.name for row in rows_] == ["layer_norm", "linear", "argmax"]
    assert all(row.seconds > 0 for row in rows_)
    assert rows_[1].line.endswith("linear.py:134, in forward")
    assert [row["name"] for row in json.loads((tmp_path / "ops.json").read_text())] == [
        row.name for row in rows_
    ]


def test_pythons_profile_of_the_first_runs(path, capsys):
    session = dlinfer.load(path, options={"enable_profiling": True})
    with pytest.raises(SessionCallError, match="run it first"):
        session.print_profile_data()
    for _ in range(12):
        session.run({"x": rows(3)})
    session.print_profile_data(n=2)
    text = capsys.readouterr().out
    assert "iteration 0" in text
    assert "iteration 1" in text
    assert "iteration 2" not in text
    assert "file-line-function" in text
    with pytest.raises(SessionCallError, match="enable_profiling"):
        dlinfer.load(path).print_profile_data()
