"""``run_benchmark``: what it returns, what excludes what, and what is not in its time."""

import itertools
import statistics
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dlinfer.vendor.qaic import Session
from dlinfer.vendor.qaic.backends import workers
from dlinfer.vendor.qaic.backends.workers import run_loops
from dlinfer.vendor.qaic.errors import QaicOptionError
from tests.vendor.qaic import models


def session_of(linear, backend: str = "onnxruntime", **options) -> Session:
    return Session(linear, backend=backend, onnx_define_symbol={"batch": 2}, **options)


@pytest.mark.parametrize("backend", ["aic", "onnxruntime"])
def test_forty_inferences_on_random_inputs_by_default(linear, stand_in, backend):
    completed, rate, seconds, batch_size = session_of(linear, backend).run_benchmark()
    assert (completed, batch_size) == (40, 2)
    assert seconds > 0
    assert rate == pytest.approx(40 / seconds)


@pytest.mark.parametrize("backend", ["aic", "onnxruntime"])
@pytest.mark.parametrize("count", [1, 7])
def test_a_number_of_inferences_on_given_inputs(linear, stand_in, backend, count):
    given = {"data": np.ones((2, 8), np.float32)}
    result = session_of(linear, backend).run_benchmark(num_inferences=count, input_dict=given)
    assert (result[0], result[3]) == (count, 2)
    if backend == "aic":
        assert stand_in.CALLS[-1] == ("run_benchmark", (count, None, ["data"]))


def test_one_embedding_takes_the_random_tokens(tmp_path):
    session = Session(models.embedding(tmp_path / "m.onnx"), backend="onnxruntime")
    assert session.run_benchmark(3)[0] == 3


def test_activations_share_the_inferences(linear):
    session = session_of(linear, num_activations=3)
    assert session.run_benchmark(num_inferences=10)[0] == 10
    assert session.run_benchmark(num_inferences=2)[0] == 2  # fewer than instances


def test_outputs_of_data_dependent_shape(tmp_path):
    """NonZero of the same input has the same shape each time, so that its bound memory fits."""
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("NonZero", ["data"], ["output"])],
        "nonzero",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("output", TensorProto.INT64, [1, "found"])],
    )
    session = Session(models.saved(graph, tmp_path / "m.onnx"), backend="onnxruntime")
    given = {"data": np.array([0, 1, 0, 2], np.float32)}
    assert session.run_benchmark(5, input_dict=given)[0] == 5
    np.testing.assert_array_equal(session.run(given)["output"], [[1, 3]])


@pytest.mark.parametrize("backend", ["aic", "onnxruntime"])
def test_a_time_instead_of_a_number(linear, stand_in, backend, monkeypatch):
    """On a clock that is 1/64 s later whenever somebody looks, so that it is the same on a busy machine."""
    session = session_of(linear, backend, num_activations=2)
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 64)
    monkeypatch.setattr(workers, "time", clock)
    monkeypatch.setattr(stand_in, "time", clock)
    completed, rate, seconds, _ = session.run_benchmark(inf_time=0.5)
    assert completed > 2
    assert seconds >= 0.5
    assert rate == pytest.approx(completed / seconds)


def test_a_number_and_a_time_exclude_each_other(linear):
    with pytest.raises(QaicOptionError, match="num_inferences or inf_time, not both"):
        session_of(linear).run_benchmark(num_inferences=40, inf_time=1)


@pytest.mark.parametrize(
    "wrong",
    [{"num_inferences": value} for value in (0, -1, 1.5, "40", True)]
    + [{"inf_time": value} for value in (0, -1.0, "1", True, float("inf"), float("nan"))],
)
def test_an_invalid_number_or_time_is_refused(linear, wrong):
    with pytest.raises(QaicOptionError, match=next(iter(wrong))):
        session_of(linear).run_benchmark(**wrong)


def test_on_a_card_the_package_measures(linear, stand_in):
    """Its benchmark runs in C++; dlinfer calls no run between."""
    session = session_of(linear, "aic", enable_metrics=True)
    before = len(stand_in.CALLS)
    session.run_benchmark(num_inferences=5)
    assert [name for name, _ in stand_in.CALLS[before:]] == ["run_benchmark"]


def test_checks_dicts_and_conversions_are_outside_the_time(linear, monkeypatch):
    """Making inputs, binding them and checking them may take as long as they like: here 600 s."""
    session = session_of(linear)
    bound = session._backend._bound  # pyright: ignore[reportAttributeAccessIssue]
    seconds = itertools.count()  # of a clock that is one later whenever somebody looks

    def slowly(*arguments):
        for _ in range(600):
            next(seconds)
        return bound(*arguments)

    monkeypatch.setattr(workers, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(session._backend, "_bound", slowly)
    assert session.run_benchmark(num_inferences=10)[2] == 1
    assert next(seconds) == 602


def test_the_loop_adds_under_ten_microseconds_to_an_inference(monkeypatch):
    """What is in the time besides the engine's call: a loop that does nothing is the overhead itself.

    By a clock that stands still while the machine does something else.
    """
    monkeypatch.setattr(workers, "time", SimpleNamespace(perf_counter=time.thread_time))
    counted = [run_loops([lambda: None], 2000, None) for _ in range(7)]
    timed = [run_loops([lambda: None], None, 0.01) for _ in range(7)]
    for loops in (counted, timed):
        assert statistics.median(seconds / done for done, seconds in loops) < 10e-6


def test_what_an_instance_raises_ends_the_benchmark():
    calls = []

    def run() -> None:
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("the engine failed")

    with pytest.raises(RuntimeError, match="the engine failed"):
        run_loops([run, run, run], 30, None)
