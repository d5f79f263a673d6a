"""What a model takes and gives, loading, releasing, running; from many threads too."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import TensorProto

from dlinfer.vendor.qaic import Session
from dlinfer.vendor.qaic.errors import QaicInputError, QaicModelError, QaicRunError
from dlinfer.vendor.qaic.tensors import TensorInfo, batch_size, check_inputs, random_inputs
from tests.vendor.qaic import models

FLOAT = np.dtype(np.float32)
BACKENDS = ["aic", "onnxruntime"]


def data(batch: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, 8)).astype(np.float32)


def close(output: np.ndarray, given: np.ndarray) -> bool:
    # float32 sums of 8 products against float64.
    return output.dtype == FLOAT and np.allclose(output, models.oracle(given), rtol=1e-5, atol=1e-6)


# --- shapes and types


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_in_the_guide", [True, False])
def test_input_shapes_and_types(linear, stand_in, monkeypatch, backend, as_in_the_guide):
    """The guide calls the dict, the samples index it; ours takes both, and Qualcomm's may be either."""
    monkeypatch.setattr(stand_in, "AS_IN_THE_GUIDE", as_in_the_guide)
    session = Session(linear, backend=backend, onnx_define_symbol={"batch": 2})
    assert session.model_input_shape_dict() == {"data": ((2, 8), FLOAT)}
    shape, kind = session.model_input_shape_dict["data"]
    assert np.zeros(shape).astype(kind).dtype == FLOAT
    assert str(kind) == "float32"


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_shapes_and_types(linear, stand_in, backend):
    session = Session(linear, backend=backend, onnx_define_symbol={"batch": 2})
    assert session.model_output_shape_dict() == session.model_output_shape_dict == {"output": ((2, 4), FLOAT)}
    # As the samples read an output.
    shape, kind = session.model_output_shape_dict["output"]
    value = session.run({"data": data()})["output"]
    assert np.frombuffer(value, dtype=kind).reshape(shape).shape == (2, 4)


def test_an_undefined_symbol_is_its_name_and_any_size_runs(linear):
    session = Session(linear, backend="onnxruntime")
    assert session.model_input_shape_dict()["data"][0] == ("batch", 8)
    for batch in (1, 3, 0):
        assert close(session.run({"data": data(batch)})["output"], data(batch))


@pytest.mark.parametrize(
    "kind", "FLOAT DOUBLE FLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL".split()
)
def test_every_type_that_numpy_has(tmp_path, kind):
    session = Session(
        models.of_type(tmp_path / "m.onnx", TensorProto.DataType.Value(kind), [2]), backend="onnxruntime"
    )
    dtype = session.model_input_shape_dict["data"][1]
    value = np.array([0, 1], dtype)
    output = session.run({"data": value})["output"]
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, value)


@pytest.mark.parametrize("kind", ["BFLOAT16", "STRING"])
def test_a_type_that_numpy_lacks_is_refused_by_name(tmp_path, kind):
    path = models.of_type(tmp_path / "m.onnx", TensorProto.DataType.Value(kind), [2])
    with pytest.raises(QaicModelError, match=r"'data' has the type tensor\(\w+\), which numpy does not have"):
        Session(path, backend="onnxruntime")


def test_a_scalar_has_an_empty_shape(tmp_path):
    session = Session(models.of_type(tmp_path / "m.onnx", TensorProto.FLOAT, []), backend="onnxruntime")
    assert session.model_input_shape_dict()["data"] == ((), FLOAT)
    assert session.run({"data": np.array(3.0, np.float32)})["output"] == 3.0
    assert session.run_benchmark(num_inferences=1)[3] == 1


# --- loading and releasing


def test_setup_loads_the_network(linear, stand_in):
    session = Session(linear, onnx_define_symbol={"batch": 2})
    assert session.setup() is None
    assert stand_in.CALLS[-1] == ("setup", None)
    assert session._backend._session._loaded  # pyright: ignore[reportAttributeAccessIssue]


def test_without_setup_the_first_run_loads(linear, stand_in):
    session = Session(linear, onnx_define_symbol={"batch": 2})
    before = len(stand_in.CALLS)
    assert close(session.run({"data": data()})["output"], data())
    assert [name for name, _ in stand_in.CALLS[before:]] == ["run"]


def test_reset_releases_the_network_and_its_weights(linear):
    session = Session(linear, backend="onnxruntime")
    loaded = weakref.ref(session._backend._session())  # pyright: ignore[reportAttributeAccessIssue]
    assert session.reset() is None
    gc.collect()
    assert loaded() is None
    assert session.model_input_shape_dict()["data"][0] == ("batch", 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("again", ["setup", "run"])
def test_after_reset_it_loads_again(linear, stand_in, backend, again):
    session = Session(linear, backend=backend, onnx_define_symbol={"batch": 2})
    for _ in range(2):
        session.reset()  # twice: releasing nothing is no fault
        session.reset()
        if again == "setup":
            session.setup()
            session.setup()
        assert close(session.run({"data": data()})["output"], data())


# --- run


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_takes_and_gives_dicts_of_arrays(tmp_path, stand_in, backend):
    path = models.embedding(tmp_path / "embedding.onnx")
    session = Session(path, backend=backend, onnx_define_symbol={"batch": 2, "length": 3})
    tokens = np.arange(6).reshape(2, 3)
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    outputs = session.run({"mask": mask, "tokens": tokens})
    assert list(outputs) == ["embedded", "masked"]
    np.testing.assert_array_equal(outputs["embedded"], models.weight()[tokens])
    np.testing.assert_array_equal(outputs["masked"], tokens * mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_of_any_layout(linear, stand_in, backend):
    session = Session(linear, backend=backend, onnx_define_symbol={"batch": 2})
    strided = np.asfortranarray(data(4))[::2]
    assert close(session.run({"data": strided})["output"], strided)


def test_outputs_are_the_callers_own(linear):
    session = Session(linear, backend="onnxruntime")
    first = session.run({"data": data(2, 0)})["output"]
    kept = first.copy()
    session.run({"data": data(2, 1)})
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (None, "'input_dict': expected a dict of name to array, given NoneType"),
        ([1], "given list"),
        ({}, r"the inputs \['data'\], given \[\]"),
        ({"date": data()}, r"the inputs \['data'\], given \['date'\]"),
        ({"data": data(), "more": data()}, r"given \['data', 'more'\]"),
        ({1: data()}, r"given \['1'\]"),
        ({"data": data().tolist()}, "'data': expected a numpy array, given a list"),
        ({"data": torch.zeros(2, 8)}, "given a Tensor"),
        ({"data": data().astype(np.float64)}, r"expected float32 \[batch, 8\], given float64 \(2, 8\)"),
        ({"data": data()[0]}, r"given float32 \(8,\)"),
        ({"data": data()[:, :7]}, r"expected float32 \[batch, 8\].*given float32 \(2, 7\)"),
    ],
)
def test_inputs_that_do_not_fit(linear, given, complaint):
    session = Session(linear, backend="onnxruntime")
    with pytest.raises(QaicInputError, match=complaint):
        session.run(given)
    if given is not None:  # None is the benchmark's default: random inputs
        with pytest.raises(QaicInputError, match=complaint):
            session.run_benchmark(input_dict=given)
    assert close(session.run({"data": data()})["output"], data())  # it stays usable


def test_sizes_of_one_symbol_must_agree(tmp_path):
    session = Session(models.embedding(tmp_path / "m.onnx"), backend="onnxruntime")
    tokens = np.zeros((2, 3), np.int64)
    with pytest.raises(
        QaicInputError, match=r"'mask': expected int64 \[batch, length\] with \{'batch': 2, 'length': 3\}"
    ):
        session.run({"tokens": tokens, "mask": tokens[:, :2]})


def test_a_failure_inside_the_model_is_ours_and_leaves_it_usable(tmp_path):
    session = Session(models.embedding(tmp_path / "m.onnx"), backend="onnxruntime")
    mask = np.ones((1, 1), np.int64)
    with pytest.raises(QaicRunError, match=r"'onnxruntime' failed: .*out of data bounds"):
        session.run({"tokens": mask * 99, "mask": mask})
    with pytest.raises(QaicRunError, match="out of data bounds"):
        session.run_benchmark(input_dict={"tokens": mask * 99, "mask": mask})
    assert session.run({"tokens": mask, "mask": mask})["masked"] == 1


def test_a_failure_of_the_package_is_ours(linear, stand_in, monkeypatch):
    session = Session(linear, onnx_define_symbol={"batch": 2})
    monkeypatch.setattr(session._backend._session._network, "run", 1 / 1)  # pyright: ignore
    with pytest.raises(QaicRunError, match="backend 'aic' failed: qaic's run raised TypeError"):
        session.run({"data": data()})


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_get_their_own_results(linear, stand_in, backend):
    session = Session(linear, backend=backend, onnx_define_symbol={"batch": 2}, enable_metrics=True)

    def work(thread: int) -> bool:
        return all(
            close(session.run({"data": data(2, seed)})["output"], data(2, seed))
            for seed in range(thread * 50, thread * 50 + 50)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert session.get_metrics()["num_of_inferences"] == 400


def test_threads_may_run_while_another_resets(linear):
    session = Session(linear, backend="onnxruntime")
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(session.run, {"data": data()}) for _ in range(60) for _ in [session.reset()]]
        assert all(close(run.result()["output"], data()) for run in runs)


# --- the checks themselves

# Machines that do much else besides draw slowly.
slowly = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
SHAPES = st.lists(st.sampled_from([1, 2, "a", "b", None]), max_size=3).map(tuple)
DTYPES = st.sampled_from([np.dtype(name) for name in ("float32", "float16", "int64", "uint8", "bool")])
INFOS = st.dictionaries(st.text(min_size=1, max_size=3), st.builds(TensorInfo, SHAPES, DTYPES), max_size=4)


@slowly
@given(INFOS)
def test_random_inputs_fit_every_model(infos):
    inputs = random_inputs(infos)
    check_inputs(inputs, infos)
    assert batch_size(inputs) == 1 or next(iter(infos.values())).shape[0] == batch_size(inputs)


@slowly
@given(INFOS, st.data())
def test_one_wrong_size_is_refused_with_its_input(infos, draw):
    numbered = [name for name, info in infos.items() if any(isinstance(size, int) for size in info.shape)]
    assume(numbered)
    inputs = random_inputs(infos)
    name = draw.draw(st.sampled_from(numbered))
    axis = next(axis for axis, size in enumerate(infos[name].shape) if isinstance(size, int))
    inputs[name] = np.concatenate([inputs[name], inputs[name]], axis)
    with pytest.raises(QaicInputError) as caught:
        check_inputs(inputs, infos)
    assert caught.value.fields["name"] == name
