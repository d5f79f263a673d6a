"""S0-01 to S0-48: EngineLLM's constructors, ``process`` and what it says of its graphs, on emulated chips."""

from typing import Any

import numpy as np
import pytest

from dlinfer import settings
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import SophgoCallError, SophgoModelError
from dlinfer.vendor.sophgo.sail import Dtype
from dlinfer.vendor.sophgo.sail.arrays import to_bfloat16
from tests.vendor.sophgo.bmodels import WIDTH, oracle
from tests.vendor.sophgo.conftest import numbers, relative

FLOAT16 = 5e-3  # of float16 with float32 sums, 32 products deep: measured 4e-4


def own_tensors(engine: sail.EngineLLM, graph: str, stage: int = 0, device: int = 0):
    """Inputs and outputs of one's own, with system and device memory."""
    with settings.override(sophgo_emulate=engine._model.chip):  # several chips are emulated in these tests
        handle = sail.Handle(device)
        assert handle.device is engine._model.devices[device]
        inputs, outputs = tensors_on(handle, engine, graph, stage)
    return inputs, outputs


def tensors_on(handle: sail.Handle, engine: sail.EngineLLM, graph: str, stage: int):
    inputs = {
        index: sail.Tensor(
            handle,
            engine.get_input_shape(graph, index, stage),
            engine.get_input_dtype(graph, index),
            True,
            True,
        )
        for index in range(engine.get_input_num(graph))
    }
    outputs = {
        index: sail.Tensor(
            handle,
            engine.get_output_shape(graph, index, stage),
            engine.get_output_dtype(graph, index),
            True,
            True,
        )
        for index in range(engine.get_output_num(graph))
    }
    return inputs, outputs


def run(engine: sail.EngineLLM, graph: str, stage: int = 0, device: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(found, wanted) of one run with float16 numbers."""
    inputs, outputs = own_tensors(engine, graph, stage, device)
    values = numbers(engine.get_input_shape(graph, 0, stage)[1])
    for index, value in enumerate(values):
        inputs[index].update_data(value.astype(np.float16))
        inputs[index].sync_s2d()
    assert engine.process(graph, inputs, outputs) == 0, engine.last_error
    outputs[0].sync_d2s()
    return outputs[0].asnumpy().view(np.float16), oracle(graph, *values)


# --- making one


def test_s0_10_from_a_file(engine):
    """S0-01: it manages what the bmodel holds."""
    assert "mlp" in engine.get_graph_names()
    assert relative(*run(engine, "mlp")) < FLOAT16


def test_s0_11_from_bytes(bmodel, open_chips):
    data = bmodel("bm1684x").read_bytes()
    engine = sail.EngineLLM(data, len(data), [0])
    del data
    assert relative(*run(engine, "head")) < FLOAT16


def test_s0_11_the_size_is_that_of_the_bytes(bmodel, open_chips):
    data = bmodel("bm1684x").read_bytes()
    with pytest.raises(SophgoCallError, match="bmodel_size"):
        sail.EngineLLM(data, len(data) - 1, [0])


@pytest.mark.parametrize("chip", ["bm1684x", "bm1688"])
def test_s0_12_with_flags(bmodel, open_chips, chip):
    """S0-13: BM_RUNTIME_SHARE_MEM, as the enumeration and as its number."""
    for flags in (sail.BmrtFlag.BM_RUNTIME_SHARE_MEM, 1):
        engine = sail.EngineLLM(str(bmodel(chip)), flags, [0])
        assert engine._model.flags & sail.BmrtFlag.BM_RUNTIME_SHARE_MEM
        assert relative(*run(engine, "mlp")) < FLOAT16


def test_s0_13_the_flags_reach_bmruntime(bmodel, open_chips):
    """On bm1688, whose two cores share nothing where they are not told to; on bm1684x the runtime always shares."""
    path = str(bmodel("bm1688"))
    assert sail.EngineLLM(path, [0])._model.flags == 0
    for flags in (sail.BmrtFlag.BM_RUNTIME_SHARE_MEM, sail.BmrtFlag.BM_RUNTIME_CHECK_MEM):
        known = sail.EngineLLM(path, flags, [0])._model.flags & 3
        assert known == flags  # BMRuntime adds one of its own to the first, "share dynamic memory"
    assert int(sail.BmrtFlag.BM_RUNTIME_SHARE_MEM) == 1
    assert int(sail.BmrtFlag.BM_RUNTIME_AUTO) == 0


@pytest.mark.parametrize(("name", "devices"), [("two devices", [4, 7]), ("eight devices", [*range(8)])])
def test_s0_01_and_14_several_devices(bmodel, open_chips, name, devices):
    """A bmodel compiled for several devices: every device has inputs and outputs of its own, and all run at once."""
    engine = sail.EngineLLM(str(bmodel(name)), devices)
    assert engine.get_device_ids() == devices
    count = engine.get_input_num("mlp")
    assert [engine.get_input_tensor_devid("mlp", index) for index in range(count)] == sorted(
        [*devices, *devices]
    )
    handles = {device: sail.Handle(device) for device in devices}
    inputs, outputs, wanted = {}, {}, {}
    for place, device in enumerate(devices):
        values = numbers(8, seed=place)
        wanted[place] = oracle("mlp", *values)
        for side, value in enumerate(values):
            tensor = sail.Tensor(handles[device], [1, 8, WIDTH], Dtype.BM_FLOAT16, False, True)
            tensor.update_data(value.astype(np.float16))
            inputs[2 * place + side] = tensor
        assert engine.get_output_tensor_devid("mlp", place) == device
        outputs[place] = sail.Tensor(handles[device], [1, 8, WIDTH], Dtype.BM_FLOAT16, False, True)
    assert engine.process("mlp", inputs, outputs) == 0, engine.last_error
    for place, tensor in outputs.items():
        assert relative(tensor.asnumpy().view(np.float16), wanted[place]) < FLOAT16


def test_s0_14_a_bmodel_of_one_device_on_eight_runs_on_the_first(bmodel, open_chips):
    engine = sail.EngineLLM(str(bmodel("bm1684x")), list(range(8)))
    assert engine.get_device_ids() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert relative(*run(engine, "mlp")) < FLOAT16


def test_keywords_name_the_same_arguments(bmodel, open_chips):
    path = str(bmodel("bm1684x"))
    data = bmodel("bm1684x").read_bytes()
    for made in (
        sail.EngineLLM(bmodel_path=path, dev_ids=[0]),
        sail.EngineLLM(bmodel_bytes=data, bmodel_size=len(data), dev_ids=[0]),
        sail.EngineLLM(path, flags=1, dev_ids=[0]),
    ):
        assert made.get_device_ids() == [0]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((), "neither a path nor the bytes"),
        (("x.bmodel",), "none of its three forms"),
        (("x.bmodel", [0], [0], [0]), "none of its three forms"),
        (("x.bmodel", "SHARE", [0]), "no bits"),
        (("x.bmodel", -1, [0]), "no bits"),
        (("x.bmodel", []), "one or more different"),
        (("x.bmodel", [0, 0]), "one or more different"),
        (("x.bmodel", 0), "no list"),
    ],
)
def test_other_arguments_are_refused(arguments, match):
    with pytest.raises(SophgoCallError, match=match):
        sail.EngineLLM(*arguments)


@pytest.mark.parametrize("device", [-1, 1000, True, "0"])
def test_a_number_that_is_no_device_is_refused(bmodel, open_chips, device):
    with pytest.raises(SophgoCallError, match="no number of a device"):
        sail.EngineLLM(str(bmodel("bm1684x")), [device])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SophgoModelError, match="No such file"):
        sail.EngineLLM(str(tmp_path / "none.bmodel"), [0])


# --- running


def test_s0_20_process_gives_0(engine):
    inputs, outputs = own_tensors(engine, "mlp")
    assert engine.process("mlp", inputs, outputs) == 0
    assert engine.last_error is None


def test_s0_20_process_gives_another_number_and_raises_nothing(engine, caplog):
    inputs, outputs = own_tensors(engine, "mlp")
    assert engine.process("none", inputs, outputs) == sail.Failure.ARGUMENT
    assert isinstance(engine.last_error, SophgoCallError)
    assert "no graph 'none'" in str(engine.last_error)
    assert "no graph 'none'" in caplog.text
    unhashable: Any = []
    assert engine.process(unhashable, inputs, outputs) == sail.Failure.ARGUMENT
    assert engine.process("mlp", inputs, outputs) == 0
    assert engine.last_error is None


def test_s0_21_several_graphs_by_name(llm):
    """S0-02: ``graph_name`` chooses; each has its own weights."""
    assert llm.get_graph_names() == ["mlp", "head"]
    for graph in ("mlp", "head"):
        assert relative(*run(llm, graph)) < FLOAT16
    found, _ = run(llm, "head")
    assert relative(found, oracle("mlp", *numbers(4))) > 0.1


def test_s0_22_outputs_are_the_callers(engine):
    """The output tensor that is handed in is what is written, and only it."""
    inputs, outputs = own_tensors(engine, "mlp")
    _, others = own_tensors(engine, "mlp")
    inputs[1].memory_set(0.5)
    for tensor in (*outputs.values(), *others.values()):
        tensor.memory_set(7)
    inputs[0].zeros()
    assert engine.process("mlp", inputs, outputs) == 0
    outputs[0].sync_d2s()
    others[0].sync_d2s()
    assert (outputs[0].asnumpy().view(np.float16) == 0.5).all()
    assert (others[0].asnumpy().view(np.float16) == 7).all()


def test_process_reads_and_writes_device_memory_only(engine):
    inputs, outputs = own_tensors(engine, "mlp")
    for tensor in inputs.values():
        tensor.zeros()
    inputs[1].update_data(np.ones(inputs[1].shape(), np.float16))  # not synchronised
    outputs[0].update_data(np.full(outputs[0].shape(), 3, np.float16))
    assert engine.process("mlp", inputs, outputs) == 0
    assert (outputs[0].asnumpy().view(np.float16) == 3).all()
    outputs[0].sync_d2s()
    assert (outputs[0].asnumpy() == 0).all()


def test_s0_05_every_stage_runs(engine):
    for stage in range(2):
        assert relative(*run(engine, "mlp", stage)) < FLOAT16


@pytest.mark.parametrize("flags", [(), (sail.BmrtFlag.BM_RUNTIME_AUTO,)], ids=["own flags", "flags 0"])
@pytest.mark.parametrize("chip", ["bm1684x", "bm1688"])
def test_s0_05_a_stage_before_a_larger_one_keeps_its_memory(bmodel, open_chips, chip, flags):
    """BMRuntime by itself gives it back, and the stage then runs over commands of others (raw/growing_stages.py)."""
    engine = sail.EngineLLM(str(bmodel(f"growing {chip}")), *flags, [0])
    for graph, stage in (("mlp", 0), ("mlp", 0), ("head", 0), ("mlp", 1), ("mlp", 0), ("head", 0)):
        assert relative(*run(engine, graph, stage)) < FLOAT16


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # int8: steps of 1/32 for inputs up to 4, of 1/16 for outputs up to 8.
    [("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 6e-2), ("basic", FLOAT16), ("tagged", FLOAT16)],
)
def test_every_type_and_addr_mode_runs(opened, name, tolerance):
    engine = opened(name)
    inputs, outputs = own_tensors(engine, "mlp")
    values = numbers(8)
    for index, value in enumerate(values):
        dtype = engine.get_input_dtype("mlp", index)
        if dtype == Dtype.BM_INT8:
            inputs[index].scale_from(value, engine.get_input_scale("mlp", index))
        elif dtype == Dtype.BM_BFLOAT16:
            inputs[index].update_data(to_bfloat16(value))
        else:
            inputs[index].update_data(value.astype(np.float16) if dtype == Dtype.BM_FLOAT16 else value)
        inputs[index].sync_s2d()
    assert engine.process("mlp", inputs, outputs) == 0, engine.last_error
    outputs[0].sync_d2s()
    found = outputs[0].scale_to(engine.get_output_scale("mlp", 0))
    assert relative(found, oracle("mlp", *values)) < tolerance


# --- what there is


def test_s0_30_get_device_ids(bmodel, open_chips):
    assert sail.EngineLLM(str(bmodel("bm1684x")), [2]).get_device_ids() == [2]


def test_s0_31_get_graph_names(llm):
    assert llm.get_graph_names() == ["mlp", "head"]


@pytest.mark.parametrize(("name", "mode"), [("basic", 0), ("bm1684x", 1), ("bm1688", 1), ("tagged", 2)])
def test_s0_32_get_addr_mode(opened, name, mode):
    assert opened(name).get_addr_mode("mlp") == mode


def test_s0_33_get_stage_num(llm):
    assert (llm.get_stage_num("mlp"), llm.get_stage_num("head")) == (2, 1)


def test_s0_34_get_input_num(engine):
    assert engine.get_input_num("mlp") == 2


def test_s0_35_get_output_num(engine):
    assert engine.get_output_num("mlp") == 1


@pytest.mark.parametrize(("name", "dynamic"), [("bm1684x", False), ("dynamic", True)])
def test_s0_36_get_is_dynamic(opened, name, dynamic):
    assert opened(name).get_is_dynamic("mlp") is dynamic


@pytest.mark.parametrize("rows", [8, 5, 1])
def test_s0_36_a_dynamic_graph_takes_smaller_shapes(opened, rows):
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


def test_s0_36_a_dynamic_graph_takes_no_larger_shape(opened):
    engine = opened("dynamic")
    _, outputs = own_tensors(engine, "mlp")
    with settings.override(sophgo_emulate="bm1684x"):
        handle = sail.Handle(0)
        large = {index: sail.Tensor(handle, [1, 9, WIDTH], Dtype.BM_FLOAT16, False, True) for index in (0, 1)}
    assert engine.process("mlp", large, outputs) == sail.Failure.ARGUMENT
    assert "at most those of [1, 8, 16]" in str(engine.last_error)


def test_s0_37_get_input_name(engine):
    """S0-04: ``index`` counts from 0 in the model's order."""
    assert [engine.get_input_name("mlp", index) for index in (0, 1)] == ["x", "bias"]


def test_s0_38_get_output_name(engine):
    """The compiler adds the op to the name it was given."""
    assert engine.get_output_name("mlp", 0).startswith("y")


def test_s0_39_get_input_tensor_devid(bmodel, open_chips):
    """The number that was given to the constructor, not its place in the list."""
    assert sail.EngineLLM(str(bmodel("bm1684x")), [3, 5]).get_input_tensor_devid("mlp", 1) == 3


def test_s0_40_get_output_tensor_devid(bmodel, open_chips):
    assert sail.EngineLLM(str(bmodel("bm1684x")), [3]).get_output_tensor_devid("mlp", 0) == 3


def test_s0_41_get_input_shape(engine):
    assert engine.get_input_shape("mlp", 0) == [1, 8, 16]
    assert engine.get_input_shape("mlp", 1, 1) == [1, 16, 16]
    assert engine.get_input_shape("mlp", index=1, stage=0) == [1, 8, 16]


def test_s0_42_get_output_shape(engine):
    assert [engine.get_output_shape("mlp", 0, stage) for stage in (0, 1)] == [[1, 8, 16], [1, 16, 16]]


def test_s0_43_get_input_max_shape(llm):
    assert llm.get_input_max_shape("mlp", 0) == [1, 16, 16]
    assert llm.get_input_max_shape("head", 0) == [1, 4, 16]


def test_s0_44_get_output_max_shape(engine):
    assert engine.get_output_max_shape("mlp", 0) == [1, 16, 16]


TYPES = [
    ("bm1684x", Dtype.BM_FLOAT16),
    ("float32", Dtype.BM_FLOAT32),
    ("bfloat16", Dtype.BM_BFLOAT16),
    ("int8", Dtype.BM_INT8),
]


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_s0_45_get_input_dtype(opened, name, dtype):
    assert opened(name).get_input_dtype("mlp", 0) is dtype


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_s0_46_get_output_dtype(opened, name, dtype):
    assert opened(name).get_output_dtype("mlp", 0) is dtype


def test_s0_47_get_input_scale(opened, llm):
    """The threshold 4 of the calibration in steps of 127."""
    assert opened("int8").get_input_scale("mlp", 0) == pytest.approx(127 / 4)
    assert llm.get_input_scale("mlp", 0) == 1.0


def test_s0_48_get_output_scale(opened, llm):
    assert opened("int8").get_output_scale("mlp", 0) == pytest.approx(8 / 127)
    assert llm.get_output_scale("mlp", 0) == 1.0


ABOUT_A_GRAPH = ["get_addr_mode", "get_stage_num", "get_input_num", "get_output_num", "get_is_dynamic"]
ABOUT_A_TENSOR = [
    f"get_{side}_{what}"
    for side in ("input", "output")
    for what in ("name", "tensor_devid", "shape", "max_shape", "dtype", "scale")
]


@pytest.mark.parametrize("call", ABOUT_A_GRAPH)
def test_s0_02_a_graph_that_is_not_there(llm, call):
    with pytest.raises(SophgoCallError, match="no graph 'none'; there are mlp, head"):
        getattr(llm, call)("none")


@pytest.mark.parametrize("call", ABOUT_A_TENSOR)
@pytest.mark.parametrize("index", [-1, 2, "0", True])
def test_s0_04_an_index_that_is_not_there(llm, call, index):
    with pytest.raises(SophgoCallError, match=r"has (in|out)puts 0 to"):
        getattr(llm, call)("mlp", index)


@pytest.mark.parametrize("call", ["get_input_shape", "get_output_shape"])
@pytest.mark.parametrize("stage", [-1, 2, None])
def test_s0_05_a_stage_that_is_not_there(llm, call, stage):
    with pytest.raises(SophgoCallError, match="has stages 0 to 1"):
        getattr(llm, call)("mlp", 0, stage)
