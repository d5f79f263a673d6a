"""EngineLLM's constructors and ``process``, on emulated chips."""

import gc
from pathlib import Path
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


def opened_with(path: Path, flags: sail.BmrtFlag | None) -> sail.EngineLLM:
    return sail.EngineLLM(str(path), [0]) if flags is None else sail.EngineLLM(str(path), flags, [0])


# --- making one


def test_open_from_a_file(engine):
    """It manages what the bmodel holds."""
    assert "mlp" in engine.get_graph_names()
    assert relative(*run(engine, "mlp")) < FLOAT16


def test_open_from_bytes(bmodel, open_chips):
    data = bmodel("bm1684x").read_bytes()
    engine = sail.EngineLLM(data, len(data), [0])
    del data
    assert relative(*run(engine, "head")) < FLOAT16


def test_the_size_is_that_of_the_bytes(bmodel, open_chips):
    data = bmodel("bm1684x").read_bytes()
    with pytest.raises(SophgoCallError, match="bmodel_size"):
        sail.EngineLLM(data, len(data) - 1, [0])


@pytest.mark.parametrize("chip", ["bm1684x", pytest.param("bm1688", marks=pytest.mark.full)])
def test_open_with_flags(bmodel, open_chips, chip):
    """BM_RUNTIME_SHARE_MEM, as the enumeration and as its number."""
    for flags in (sail.BmrtFlag.BM_RUNTIME_SHARE_MEM, 1):
        engine = sail.EngineLLM(str(bmodel(chip)), flags, [0])
        assert engine._model.flags & sail.BmrtFlag.BM_RUNTIME_SHARE_MEM
        assert relative(*run(engine, "mlp")) < FLOAT16


def test_the_flags_reach_bmruntime(bmodel, open_chips):
    """On bm1688, whose two cores share nothing where they are not told to; on bm1684x the runtime always shares."""
    path = str(bmodel("bm1688"))
    assert sail.EngineLLM(path, [0])._model.flags == 0
    for flags in (sail.BmrtFlag.BM_RUNTIME_SHARE_MEM, sail.BmrtFlag.BM_RUNTIME_CHECK_MEM):
        known = sail.EngineLLM(path, flags, [0])._model.flags & 3
        assert known == flags  # BMRuntime adds one of its own to the first, "share dynamic memory"
    assert int(sail.BmrtFlag.BM_RUNTIME_SHARE_MEM) == 1
    assert int(sail.BmrtFlag.BM_RUNTIME_AUTO) == 0


@pytest.mark.parametrize(("name", "devices"), [("two devices", [4, 7]), ("eight devices", [*range(8)])])
def test_several_devices(bmodel, open_chips, name, devices):
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


def test_a_bmodel_of_one_device_on_eight_runs_on_the_first(bmodel, open_chips):
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
        (("x.bmodel", "SHARE", [0]), "not bits"),
        (("x.bmodel", -1, [0]), "not bits"),
        (("x.bmodel", []), "one or more different"),
        (("x.bmodel", [0, 0]), "one or more different"),
        (("x.bmodel", 0), "not a list"),
    ],
)
def test_other_arguments_are_refused(arguments, match):
    with pytest.raises(SophgoCallError, match=match):
        sail.EngineLLM(*arguments)


@pytest.mark.parametrize("device", [-1, 1000, True, "0"])
def test_a_number_that_is_no_device_is_refused(bmodel, open_chips, device):
    with pytest.raises(SophgoCallError, match="not a device number"):
        sail.EngineLLM(str(bmodel("bm1684x")), [device])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SophgoModelError, match="No such file"):
        sail.EngineLLM(str(tmp_path / "none.bmodel"), [0])


# --- running


def test_process_gives_0(engine):
    inputs, outputs = own_tensors(engine, "mlp")
    assert engine.process("mlp", inputs, outputs) == 0
    assert engine.last_error is None


def test_process_gives_another_number_and_raises_nothing(engine, caplog):
    inputs, outputs = own_tensors(engine, "mlp")
    assert engine.process("none", inputs, outputs) == sail.Failure.ARGUMENT
    assert isinstance(engine.last_error, SophgoCallError)
    assert "no graph 'none'" in str(engine.last_error)
    assert "no graph 'none'" in caplog.text
    unhashable: Any = []
    assert engine.process(unhashable, inputs, outputs) == sail.Failure.ARGUMENT
    assert engine.process("mlp", inputs, outputs) == 0
    assert engine.last_error is None


def test_several_graphs_by_name(llm):
    """``graph_name`` chooses; each graph has its own weights."""
    assert llm.get_graph_names() == ["mlp", "head"]
    for graph in ("mlp", "head"):
        assert relative(*run(llm, graph)) < FLOAT16
    found, _ = run(llm, "head")
    assert relative(found, oracle("mlp", *numbers(4))) > 0.1


def test_outputs_are_the_callers(engine):
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


def test_every_stage_runs(engine):
    for stage in range(2):
        assert relative(*run(engine, "mlp", stage)) < FLOAT16


@pytest.mark.parametrize("chip", ["bm1684x", pytest.param("bm1688", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "flags", [pytest.param(None, marks=pytest.mark.full), sail.BmrtFlag.BM_RUNTIME_SHARE_MEM]
)
@pytest.mark.full
def test_an_engine_keeps_its_memory_when_a_larger_one_comes_and_goes(bmodel, open_chips, chip, flags):
    """What it works in, which BMRuntime by itself gives back for the larger one's, as in the next test."""
    small = opened_with(bmodel(f"growing {chip}"), flags)
    for _ in range(2):
        large = opened_with(bmodel(f"large {chip}"), flags)
        for engine, stage in ((small, 0), (large, 0), (small, 1), (large, 0), (small, 0)):
            assert relative(*run(engine, "mlp", stage)) < FLOAT16
        del engine, large
        gc.collect()
        assert relative(*run(small, "mlp", 1)) < FLOAT16


@pytest.mark.parametrize("flags", [None, sail.BmrtFlag.BM_RUNTIME_AUTO])
@pytest.mark.parametrize("chip", ["bm1684x", pytest.param("bm1688", marks=pytest.mark.full)])
def test_a_stage_before_a_larger_one_keeps_its_memory(bmodel, open_chips, chip, flags):
    """BMRuntime by itself gives it back, and the stage then runs over commands of others (raw/growing_stages.py)."""
    engine = opened_with(bmodel(f"growing {chip}"), flags)
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


def test_a_network_of_addr_mode_basic_is_loaded_behind_larger_ones(fresh, bmodel):
    """BMRuntime takes its inputs and outputs for parts of the memory of all networks, which it moves when that grows;
    the network then gave zeros."""
    large = bmodel("growing bm1684x")
    basic = sail.EngineLLM(str(bmodel("basic")), [0])
    for device in (0, 1):  # the memory moves on every device
        with pytest.raises(SophgoModelError, match=r"wrong numbers.* load this bmodel before"):
            sail.EngineLLM(str(large), [device])
    assert relative(*run(basic, "mlp")) < FLOAT16
    del basic
    engines = [sail.EngineLLM(str(path), [0]) for path in (large, bmodel("basic"), bmodel("float32"))]
    assert relative(*run(engines[1], "mlp")) < FLOAT16
