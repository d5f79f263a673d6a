"""What EngineLLM says of its graphs: every getter, on emulated chips."""

import numpy as np
import pytest

from dlinfer import settings
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import SophgoCallError
from dlinfer.vendor.sophgo.runtime.loaded import LoadedModel, NetworkInfo, TensorInfo
from dlinfer.vendor.sophgo.sail import Dtype
from tests.vendor.sophgo.bmodels import WIDTH, oracle
from tests.vendor.sophgo.conftest import numbers, relative
from tests.vendor.sophgo.test_sail_engine import FLOAT16, own_tensors


@pytest.fixture(scope="module")
def on_two(bmodel, open_chips) -> sail.EngineLLM:
    """A bmodel of two devices, 4 and 7; each has both inputs and the output."""
    return sail.EngineLLM(str(bmodel("two devices")), [4, 7])


def test_get_device_ids(bmodel, open_chips):
    assert sail.EngineLLM(str(bmodel("bm1684x")), [2]).get_device_ids() == [2]


def test_get_graph_names(llm):
    assert llm.get_graph_names() == ["mlp", "head"]


@pytest.mark.parametrize(("name", "mode"), [("basic", 0), ("bm1684x", 1), ("bm1688", 1), ("tagged", 2)])
def test_get_addr_mode(opened, name, mode):
    assert opened(name).get_addr_mode("mlp") == mode


def test_get_stage_num(llm):
    assert (llm.get_stage_num("mlp"), llm.get_stage_num("head")) == (2, 1)


def test_get_input_num(engine, on_two):
    assert (engine.get_input_num("mlp"), on_two.get_input_num("mlp")) == (2, 4)


def test_get_output_num(engine, on_two):
    assert (engine.get_output_num("mlp"), on_two.get_output_num("mlp")) == (1, 2)


@pytest.mark.parametrize(("name", "dynamic"), [("bm1684x", False), ("dynamic", True)])
def test_get_is_dynamic(opened, name, dynamic):
    assert opened(name).get_is_dynamic("mlp") is dynamic


@pytest.mark.parametrize("rows", [8, 5, 1])
def test_a_dynamic_graph_takes_smaller_shapes(opened, rows):
    engine = opened("dynamic")
    inputs, outputs = own_tensors(engine, "mlp")
    values = numbers(rows)
    for index, value in enumerate(values):
        inputs[index].reshape([1, rows, WIDTH])
        inputs[index].update_data(value.astype(np.float16))
        inputs[index].sync_s2d()
    assert engine.process("mlp", inputs, outputs) == 0, engine.last_error
    outputs[0].sync_d2s()
    found = outputs[0].asnumpy((1, rows, WIDTH)).view(np.float16)
    assert relative(found, oracle("mlp", *values)) < FLOAT16


def test_a_dynamic_graph_takes_no_larger_shape(opened):
    engine = opened("dynamic")
    _, outputs = own_tensors(engine, "mlp")
    with settings.override(sophgo_emulate="bm1684x"):
        handle = sail.Handle(0)
        large = {index: sail.Tensor(handle, [1, 9, WIDTH], Dtype.BM_FLOAT16, False, True) for index in (0, 1)}
    assert engine.process("mlp", large, outputs) == sail.Failure.ARGUMENT
    assert "at most those of [1, 8, 16]" in str(engine.last_error)


def test_get_input_name(engine):
    """``index`` counts from 0 in the model's order."""
    assert [engine.get_input_name("mlp", index) for index in (0, 1)] == ["x", "bias"]


def test_get_output_name(engine, on_two):
    """The compiler adds the op to the name it was given."""
    assert engine.get_output_name("mlp", 0) == "y_Add"
    assert [on_two.get_output_name("mlp", index) for index in (0, 1)] == ["y_Add", "y_Add"]


def test_get_input_tensor_devid(bmodel, on_two):
    """The number that was given to the constructor, not its place in the list."""
    assert [on_two.get_input_tensor_devid("mlp", index) for index in range(4)] == [4, 4, 7, 7]
    assert sail.EngineLLM(str(bmodel("bm1684x")), [3, 5]).get_input_tensor_devid("mlp", 1) == 3


def test_get_output_tensor_devid(bmodel, on_two):
    assert [on_two.get_output_tensor_devid("mlp", index) for index in (0, 1)] == [4, 7]
    assert sail.EngineLLM(str(bmodel("bm1684x")), [3]).get_output_tensor_devid("mlp", 0) == 3


def test_get_input_shape(engine):
    assert engine.get_input_shape("mlp", 0) == [1, 8, 16]
    assert engine.get_input_shape("mlp", 1, 1) == [1, 16, 16]
    assert engine.get_input_shape("mlp", index=1, stage=0) == [1, 8, 16]


def test_get_output_shape(engine):
    assert [engine.get_output_shape("mlp", 0, stage) for stage in (0, 1)] == [[1, 8, 16], [1, 16, 16]]


def test_get_input_max_shape(llm):
    assert llm.get_input_max_shape("mlp", 0) == [1, 16, 16]
    assert llm.get_input_max_shape("head", 0) == [1, 4, 16]


def test_get_output_max_shape(llm):
    assert llm.get_output_max_shape("mlp", 0) == [1, 16, 16]
    assert llm.get_output_max_shape("head", 0) == [1, 4, 16]


@pytest.mark.parametrize(
    ("shapes", "most"),
    [
        (((1, 16, 4), (1, 8, 32)), [1, 16, 32]),
        (((2, 3), (9,), (4, 2)), [9]),
        (((7,),), [7]),
    ],
)
def test_maximum_shapes_of_stages_of_which_none_is_the_largest(shapes, most):
    """Each size has its maximum; of stages with other numbers of sizes it is the one of most elements."""
    tensor = TensorInfo("x", 0, 1.0, 0, 0, shapes, ())
    network = NetworkInfo("net", False, 1, len(shapes), (tensor,), (tensor,))
    engine = sail.EngineLLM.__new__(sail.EngineLLM)
    engine._model = LoadedModel.__new__(LoadedModel)
    engine._model.networks = {"net": network}
    assert engine.get_input_max_shape("net", 0) == engine.get_output_max_shape("net", 0) == most


TYPES = [
    ("bm1684x", Dtype.BM_FLOAT16),
    ("float32", Dtype.BM_FLOAT32),
    ("bfloat16", Dtype.BM_BFLOAT16),
    ("int8", Dtype.BM_INT8),
]


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_get_input_dtype(opened, name, dtype):
    assert opened(name).get_input_dtype("mlp", 0) is dtype


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_get_output_dtype(opened, name, dtype):
    assert opened(name).get_output_dtype("mlp", 0) is dtype


def test_get_input_scale(opened, llm):
    """The threshold 4 of the calibration in steps of 127."""
    assert opened("int8").get_input_scale("mlp", 0) == pytest.approx(127 / 4)
    assert llm.get_input_scale("mlp", 0) == 1.0


def test_get_output_scale(opened, llm):
    assert opened("int8").get_output_scale("mlp", 0) == pytest.approx(8 / 127)
    assert llm.get_output_scale("mlp", 0) == 1.0


ABOUT_A_GRAPH = ["get_addr_mode", "get_stage_num", "get_input_num", "get_output_num", "get_is_dynamic"]
ABOUT_A_TENSOR = [
    f"get_{side}_{what}"
    for side in ("input", "output")
    for what in ("name", "tensor_devid", "shape", "max_shape", "dtype", "scale")
]


@pytest.mark.parametrize("call", ABOUT_A_GRAPH)
def test_a_graph_that_is_not_there(llm, call):
    with pytest.raises(SophgoCallError, match="no graph 'none'; the graphs are mlp, head"):
        getattr(llm, call)("none")


@pytest.mark.parametrize("call", ABOUT_A_TENSOR)
@pytest.mark.parametrize("index", [-1, 2, "0", True])
def test_an_index_that_is_not_there(llm, call, index):
    with pytest.raises(SophgoCallError, match=r"has (in|out)puts 0 to"):
        getattr(llm, call)("mlp", index)


@pytest.mark.parametrize("call", ["get_input_shape", "get_output_shape"])
@pytest.mark.parametrize("stage", [-1, 2, None])
def test_a_stage_that_is_not_there(llm, call, stage):
    with pytest.raises(SophgoCallError, match="has stages 0 to 1"):
        getattr(llm, call)("mlp", 0, stage)
