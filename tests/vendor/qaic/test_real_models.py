"""What .onnx files of others have: unnamed sizes, any rank, values of inputs, weights beside the graph, links."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dlinfer.vendor.qaic import Session
from dlinfer.vendor.qaic.errors import QaicCompileError, QaicInputError, QaicOptionError
from tests.vendor.qaic import models

ONES = np.ones((2, 3), np.float32)


def session_of(path: Path, **options) -> Session:
    return Session(path, backend="onnxruntime", **options)


@pytest.mark.parametrize("name", ["?", "", "-1", "*", None])
def test_an_unnamed_size_is_any_size_each_time(tmp_path, name):
    session = session_of(models.of_type(tmp_path / "m.onnx", TensorProto.FLOAT, [name, name]))
    assert session.model_input_shape_dict["data"][0] == (None, None)
    assert np.array_equal(session.run({"data": ONES})["output"], ONES)
    with pytest.raises(QaicInputError, match=r"\[\?, \?\]"):
        session.run({"data": ONES[0]})


def test_a_named_size_is_one_size(tmp_path):
    session = session_of(models.of_type(tmp_path / "m.onnx", TensorProto.FLOAT, ["n", "n"]))
    with pytest.raises(QaicInputError, match="'n': 2"):
        session.run({"data": ONES})


# --- any rank


def of_any_rank(path: Path) -> Path:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("data", "output")]
    return models.saved(
        helper.make_graph([helper.make_node("Relu", ["data"], ["output"])], "g", infos[:1], infos[1:]), path
    )


def test_an_input_of_any_rank(tmp_path):
    session = session_of(of_any_rank(tmp_path / "m.onnx"))
    assert session.model_input_shape_dict["data"] == (None, np.dtype(np.float32))
    for array in (ONES, ONES[0], ONES[0, :1].reshape(()), ONES[None]):
        assert np.array_equal(session.run({"data": array})["output"], array)
    with pytest.raises(QaicInputError, match="float32 of any shape"):
        session.run({"data": ONES.astype(np.float64)})


def test_a_benchmark_of_any_rank_says_what_to_pass(tmp_path):
    session = session_of(of_any_rank(tmp_path / "m.onnx"))
    with pytest.raises(QaicInputError, match="input_dict"):
        session.run_benchmark(num_inferences=1)
    assert session.run_benchmark(num_inferences=1, input_dict={"data": ONES})[0] == 1


def test_a_scalar_is_no_input_of_any_rank(tmp_path):
    session = session_of(models.of_type(tmp_path / "m.onnx", TensorProto.FLOAT, []))
    assert session.model_input_shape_dict["data"][0] == ()
    with pytest.raises(QaicInputError):
        session.run({"data": ONES})


# --- inputs with values of the model


def with_default(path: Path) -> Path:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "shift", "y")]
    node = helper.make_node("Add", ["x", "shift"], ["y"])
    default = numpy_helper.from_array(np.array([1, 2], np.float32), "shift")
    return models.saved(helper.make_graph([node], "g", info[:2], info[2:], [default]), path)


def test_an_input_with_a_value_may_be_left_out_or_passed(tmp_path):
    session = session_of(with_default(tmp_path / "m.onnx"))
    x = np.zeros(2, np.float32)
    assert list(session.model_input_shape_dict) == ["x"]
    assert session.run({"x": x})["y"].tolist() == [1, 2]
    assert session.run({"x": x, "shift": x + 7})["y"].tolist() == [7, 7]
    assert session.run({"x": x})["y"].tolist() == [1, 2]
    assert session.run_benchmark(1, input_dict={"x": x, "shift": x})[0] == 1
    with pytest.raises(QaicInputError, match="and optionally any of"):
        session.run({"x": x, "scale": x})
    with pytest.raises(QaicInputError, match="'shift'"):
        session.run({"x": x, "shift": np.zeros(3, np.float32)})


# --- symbols


def test_a_symbol_that_the_model_lacks(linear, stand_in):
    for backend in ("onnxruntime", "aic"):
        with pytest.raises(QaicOptionError, match="'bacth' is not one of them") as caught:
            Session(linear, backend=backend, onnx_define_symbol={"bacth": 2})
        assert "(batch)" in str(caught.value)


def test_random_inputs_that_do_not_fit_say_what_to_pass(tmp_path):
    """A model that runs on two rows at least."""
    info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 3]) for name in ("data", "output")
    ]
    node = helper.make_node("Reshape", ["data", "shape"], ["output"])
    shape = numpy_helper.from_array(np.array([2, 3], np.int64), "shape")
    path = models.saved(helper.make_graph([node], "g", info[:1], info[1:], [shape]), tmp_path / "m.onnx")
    with pytest.raises(QaicInputError, match=r"onnx_define_symbol.*with size 1 for rows fail"):
        session_of(path).run_benchmark(num_inferences=1)
    assert session_of(path).run_benchmark(1, input_dict={"data": ONES})[0] == 1
    assert session_of(path, onnx_define_symbol={"rows": 2}).run_benchmark(1)[0] == 1


# --- weights in files of their own


def beside(folder: Path) -> Path:
    """``linear`` with its weight in a file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    model = onnx.load(models.linear(folder / "whole.onnx"))
    onnx.save_model(
        model, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0
    )
    (folder / "whole.onnx").unlink()
    return folder / "model.onnx"


def right(session: Session) -> bool:
    data = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
    return np.allclose(session.run({"data": data})["output"], models.oracle(data), rtol=2e-2, atol=1e-2)


def test_the_compiled_model_stands_without_the_one_it_was_made_of(tmp_path):
    path = beside(tmp_path / "first")
    out = tmp_path / "compiled"
    assert right(session_of(path, output_dir=out))
    for file in path.parent.iterdir():
        file.unlink()
    moved = tmp_path / "moved"
    out.rename(moved)
    assert right(session_of(moved / "model.compiled.onnx"))


def test_a_model_in_one_file_is_compiled_into_one(linear, tmp_path):
    session_of(linear, output_dir=tmp_path / "compiled")
    assert [file.name for file in (tmp_path / "compiled").iterdir()] == ["linear.compiled.onnx"]


@pytest.mark.parametrize("fp16", [False, True])
def test_a_hub_cache_of_links(tmp_path, fp16):
    """snapshots/x/model.onnx and its weights are links into blobs, whose names are digests."""
    path = beside(tmp_path / "made")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "x"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(path.parent.iterdir())):
        os.replace(file, blobs / f"{number}abc")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"{number}abc")
    assert right(session_of(snapshot / "model.onnx", convert_to_fp16=fp16))


def test_weights_outside_of_the_models_folder_are_not_read(tmp_path):
    path = beside(tmp_path / "made")
    model = onnx.load(path, load_external_data=False)
    (weight,) = model.graph.initializer
    next(entry for entry in weight.external_data if entry.key == "location").value = "../secret"
    path.write_bytes(model.SerializeToString())
    (tmp_path / "secret").write_bytes(bytes(1000))
    for fp16 in (False, True):
        with pytest.raises(QaicCompileError):
            session_of(path, convert_to_fp16=fp16)


# --- paths


def test_another_working_directory_later(linear, tmp_path, monkeypatch):
    monkeypatch.chdir(linear.parent)
    session = session_of(Path(linear.name), output_dir="out")
    other = tmp_path / "elsewhere"
    other.mkdir()
    monkeypatch.chdir(other)
    session.reset()
    assert right(session)
    assert list(other.iterdir()) == []
