"""Tensors on the memory that the runtime gave to a graph, and the rules of addr_mode."""

import gc

import numpy as np
import pytest

from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import SophgoCallError
from dlinfer.vendor.sophgo.runtime.device import Place
from tests.vendor.sophgo.bmodels import oracle
from tests.vendor.sophgo.conftest import numbers, relative

FLOAT16 = 5e-3

LISTS = ["get_input_tensors", "get_output_tensors"]
SINGLE = ["get_input_tensor", "get_output_tensor"]
ANY_MODE = ["get_input_tensors_addrmode0", "get_output_tensors_addrmode0"]


def run_on(engine: sail.EngineLLM, inputs, outputs, rows: int) -> float:
    """The distance of a run on a graph's own tensors from the oracle."""
    values = numbers(rows)
    for index, value in enumerate(values):
        inputs[index].update_data(value.astype(np.float16))
    assert engine.process("mlp", inputs, outputs) == 0, engine.last_error
    return relative(outputs[0].asnumpy().view(np.float16), oracle("mlp", *values))


def place(engine: sail.EngineLLM, side: str, index: int, stage: int) -> Place:
    """Where the runtime put an input or output."""
    return getattr(engine._model.networks["mlp"], f"{side}s")[index].places[stage]


def places(tensors: dict[int, sail.Tensor]) -> dict[int, Place]:
    """Where tensors lie."""
    return {index: tensor.device_memory().place for index, tensor in tensors.items()}


def test_get_input_tensors_of_a_name(engine):
    """``tensor_name`` chooses; the key is the index in the graph."""
    tensors = engine.get_input_tensors("mlp", "bias")
    assert places(tensors) == {1: place(engine, "input", 1, 0)}
    assert places(engine.get_input_tensors("mlp", "x", 1)) == {0: place(engine, "input", 0, 1)}
    assert tensors[1].shape() == [1, 8, 16]
    assert engine.get_input_tensors("mlp", "bias", 1)[1].shape() == [1, 16, 16]
    assert engine.get_input_tensors("mlp", tensor_name="x", stage=1)[0].shape() == [1, 16, 16]
    assert engine.get_input_tensors("mlp", "none") == {}


def test_get_input_tensors_of_a_stage(engine):
    assert [t.shape() for t in engine.get_input_tensors("mlp").values()] == [[1, 8, 16]] * 2
    assert [t.shape() for t in engine.get_input_tensors("mlp", 1).values()] == [[1, 16, 16]] * 2
    assert [t.shape() for t in engine.get_input_tensors("mlp", stage=1).values()] == [[1, 16, 16]] * 2
    for stage in (0, 1):
        assert places(engine.get_input_tensors("mlp", stage)) == {
            index: place(engine, "input", index, stage) for index in (0, 1)
        }


def test_get_input_tensor(engine):
    for index in (0, 1):
        for stage in (0, 1):
            tensor = engine.get_input_tensor("mlp", index, stage)
            assert tensor.device_memory().place == place(engine, "input", index, stage)
    tensor = engine.get_input_tensor("mlp", 1, 1)
    assert tensor.shape() == [1, 16, 16]
    assert tensor.dtype() is sail.Dtype.BM_FLOAT16


def test_get_output_tensors_of_a_name(engine):
    name = engine.get_output_name("mlp", 0)
    assert places(engine.get_output_tensors("mlp", name)) == {0: place(engine, "output", 0, 0)}
    assert engine.get_output_tensors("mlp", name, 1)[0].shape() == [1, 16, 16]
    assert engine.get_output_tensors("mlp", "x") == {}


def test_get_output_tensors_of_a_stage(engine):
    assert engine.get_output_tensors("mlp")[0].shape() == [1, 8, 16]
    assert engine.get_output_tensors("mlp", 1)[0].shape() == [1, 16, 16]
    for stage in (0, 1):
        assert places(engine.get_output_tensors("mlp", stage)) == {0: place(engine, "output", 0, stage)}


def test_get_output_tensor(engine):
    for stage, rows in enumerate((8, 16)):
        tensor = engine.get_output_tensor("mlp", 0, stage)
        assert tensor.shape() == [1, rows, 16]
        assert tensor.device_memory().place == place(engine, "output", 0, stage)


def test_of_several_devices_each_lies_on_its_own(bmodel, open_chips):
    """Of one name there are as many inputs and outputs as devices."""
    engine = sail.EngineLLM(str(bmodel("two devices")), [4, 7])
    assert list(engine.get_input_tensors("mlp", "bias")) == [1, 3]
    assert list(engine.get_output_tensors("mlp", "y_Add")) == [0, 1]
    for inputs in (engine.get_input_tensors("mlp"), engine.get_input_tensors_addrmode0("mlp")):
        assert [tensor.device_id() for tensor in inputs.values()] == [4, 4, 7, 7]
    for outputs in (engine.get_output_tensors("mlp"), engine.get_output_tensors_addrmode0("mlp")):
        assert [tensor.device_id() for tensor in outputs.values()] == [4, 7]
    for index, device in enumerate((4, 7)):
        tensor = engine.get_output_tensor("mlp", index)
        assert tensor is not None
        assert tensor.device_memory().place == place(engine, "output", index, 0)
        assert tensor.device_id() == device


def test_own_tensors_are_the_graphs_memory(engine):
    """What one tensor writes another reads, with no memory of its own, and a run uses it."""
    tensor, again = engine.get_input_tensor("mlp", 0), engine.get_input_tensors("mlp")[0]
    assert not tensor.own_sys_data()
    assert not tensor.own_dev_data()
    assert tensor.device_memory().place == again.device_memory().place
    tensor.update_data(np.arange(128, dtype=np.uint16).reshape(1, 8, 16))
    assert (again.asnumpy().ravel() == np.arange(128)).all()
    for stage, rows in enumerate((8, 16)):
        inputs, outputs = engine.get_input_tensors("mlp", stage), engine.get_output_tensors("mlp", stage)
        assert run_on(engine, inputs, outputs, rows) < FLOAT16


def test_an_own_tensor_keeps_the_model(bmodel, open_chips):
    tensor = sail.EngineLLM(str(bmodel("bm1684x")), [0]).get_input_tensor("mlp", 0)
    gc.collect()
    assert tensor is not None
    tensor.memory_set(2)
    assert (tensor.asnumpy().view(np.float16) == 2).all()


@pytest.mark.parametrize("name", ["basic", "tagged"])
@pytest.mark.parametrize("call", LISTS)
def test_dicts_are_empty_where_addr_mode_is_not_1(opened, name, call):
    engine = opened(name)
    assert getattr(engine, call)("mlp") == {}
    assert getattr(engine, call)("mlp", "x") == {}


@pytest.mark.parametrize("name", ["basic", "tagged"])
@pytest.mark.parametrize("call", SINGLE)
def test_a_single_tensor_is_none_where_addr_mode_is_not_1(opened, name, call):
    assert getattr(opened(name), call)("mlp", 0) is None


def test_addrmode0_runs_on_the_graphs_own_memory(opened):
    engine = opened("basic")
    inputs = engine.get_input_tensors_addrmode0("mlp")
    outputs = engine.get_output_tensors_addrmode0("mlp", stage=0)
    assert sorted(inputs) == [0, 1]
    assert sorted(outputs) == [0]
    assert run_on(engine, inputs, outputs, 8) < FLOAT16


@pytest.mark.parametrize("call", ANY_MODE)
def test_addrmode0_is_the_same_memory_in_addr_mode_1(engine, call):
    tensors = getattr(engine, call)("mlp", 1)
    own = getattr(engine, call.removesuffix("_addrmode0"))("mlp", 1)
    assert {i: t.device_memory().place for i, t in tensors.items()} == {
        i: t.device_memory().place for i, t in own.items()
    }


@pytest.mark.parametrize("call", ANY_MODE)
def test_a_tag_is_no_address(opened, call):
    """addr_mode 2: what stands in input_mems would end the emulator when it is read."""
    with pytest.raises(SophgoCallError, match="addr_mode 2"):
        getattr(opened("tagged"), call)("mlp")


@pytest.mark.parametrize("call", [*LISTS, *ANY_MODE])
def test_a_graph_or_a_stage_that_is_not_there(llm, call):
    with pytest.raises(SophgoCallError, match="no graph"):
        getattr(llm, call)("none")
    for stage in (2, -1):
        with pytest.raises(SophgoCallError, match="stages 0 to 1"):
            getattr(llm, call)("mlp", stage)


@pytest.mark.parametrize("call", SINGLE)
def test_an_index_that_is_not_there(llm, call):
    with pytest.raises(SophgoCallError, match="puts 0 to"):
        getattr(llm, call)("mlp", 2)


def test_an_argument_that_is_no_name_and_no_stage(llm):
    with pytest.raises(SophgoCallError, match="neither"):
        llm.get_input_tensors("mlp", 1, 1)
