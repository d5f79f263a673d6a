"""What goes wrong is a clear error, never the end of the process, and the next run works (line 4)."""

import ctypes
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from dlinfer.vendor.megengine.errors import (
    LiteArgumentError,
    LiteBusyError,
    LiteCallbackError,
    LiteError,
    LiteModelError,
)
from dlinfer.vendor.megengine.lite import LiteGlobal, LiteIO, LiteLayout, LiteNetwork, LiteTensor
from tests.vendor.megengine.running import check, feed, loaded, run, with_options
from tests.vendor.megengine.test_tensor import resident


def test_no_file_and_no_model(tmp_path, layer, rng):
    network = LiteNetwork()
    for path in (tmp_path / "nowhere.mge", tmp_path):
        with pytest.raises(LiteModelError, match=str(path)):
            network.load(path)
    for content in (b"", b"x", b"no model at all", bytes(4096)):
        with pytest.raises(LiteModelError):
            LiteNetwork().load(content)
    network.load(layer)
    check(network, rng)


def test_a_network_loads_once(layer, held, rng):
    """The library would keep the first model, or what it had read of a damaged one, and say nothing."""
    network = loaded(layer)
    with pytest.raises(LiteError, match="make another LiteNetwork"):
        network.load(held)
    check(network, rng)
    network = LiteNetwork()
    with pytest.raises(LiteModelError):
        network.load(layer.read_bytes()[:-20])
    with pytest.raises(LiteError, match="make another LiteNetwork"):
        network.load(layer)


def test_damaged_models_end_no_process(layer):
    """In a process of its own: 60 copies, cut or with changed bytes, are refused or run."""
    code = f"""
import random
from dlinfer.vendor.megengine.lite import LiteGlobal, LiteIO, LiteLayout, LiteNetwork, LiteTensor
whole = open({str(layer)!r}, "rb").read()
for seed in range(60):
    chance = random.Random(seed)
    model = bytearray(whole)
    if seed % 2:
        model = model[: chance.randrange(1, len(model))]
    else:
        for _ in range(chance.choice((1, 30))):
            model[chance.randrange(len(model))] = chance.randrange(256)
    try:
        LiteNetwork().load(bytes(model))
    except RuntimeError:
        pass
network = LiteNetwork()
network.load(whole)
print("alive", network.get_all_output_name())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "alive ['result_0']\n", (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("wrong", [np.ones((4, 8), "int32"), np.ones((4, 8)), np.ones((2, 8), "float16")])
def test_an_input_of_the_wrong_dtype(layer, rng, wrong):
    network = loaded(layer)
    tensor = network.get_io_tensor("data")
    with pytest.raises(LiteArgumentError, match="float32"):
        tensor.set_data_by_copy(wrong)
    with pytest.raises(LiteArgumentError, match="float32"):
        tensor.set_data_by_share(wrong)
    check(network, rng)


def test_an_input_of_sizes_that_do_not_fit(layer, rng):
    network = loaded(layer)
    network.get_io_tensor("data").set_data_by_copy(np.ones((4, 9), "float32"))
    with pytest.raises(LiteError, match="shape mismatch"):
        network.forward()
    check(network, rng)


class Broken(Exception):
    pass


@pytest.mark.parametrize("kind", ["set_start_callback", "set_finish_callback"])
def test_a_callback_that_raises(layer, rng, kind):
    network, fault = loaded(layer), [True]

    def callback(ios):
        if fault[0]:
            raise Broken("of its own")
        return 0

    getattr(network, kind)(callback)
    feed(network, np.ones((4, 8), "float32"))
    with pytest.raises(LiteCallbackError, match=r"Broken: of its own") as raised:
        run(network, np.ones((4, 8), "float32"))
    assert isinstance(raised.value.__cause__, Broken)
    fault[0] = False
    check(network, rng)


def test_an_asynchronous_callback_that_raises(layer, rng):
    network, fault = loaded(layer), [True]

    def callback():
        if fault[0]:
            raise Broken("in a thread of the library")

    network.async_with_callback(callback)
    feed(network, np.ones((4, 8), "float32"))
    network.forward()
    with pytest.raises(LiteCallbackError, match="Broken: in a thread of the library"):
        network.wait()
    fault[0] = False
    check(network, rng)


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.full)])
def test_loads_and_unloads_leak_nothing(layer, rng, count):
    """Networks are made, loaded, run and dropped; what the first ones leave is the library's own memory."""
    for _ in range(20):
        check(loaded(layer), rng)
    gc.collect()
    before = resident()
    for _ in range(count):
        check(loaded(layer), rng)
    gc.collect()
    grown = resident() - before
    print(f"RSS {before >> 20} MiB before, {grown >> 10} KiB more after {count} loads and unloads")
    assert grown < 2 << 20  # a network that stayed would be 60 KiB and more


def test_networks_with_callbacks_are_given_back(layer):
    network = loaded(layer)
    network.set_finish_callback(lambda ios: 0)
    network.async_with_callback(lambda: 0)
    tensor, gone = network.get_io_tensor("data"), weakref.ref(network)
    del network
    gc.collect()
    assert gone() is not None  # its tensor still uses it
    tensor.fill_zero()
    del tensor
    gc.collect()
    assert gone() is None


def test_arguments_of_another_kind_are_refused_by_name(layer, rng):
    network = loaded(layer)
    wrong: Any = object()
    calls = {
        "io_type": lambda: LiteIO("data", io_type=9),
        "phase": lambda: network.get_io_tensor("data", 9),
        "name": lambda: network.get_io_tensor(wrong),
        "decryption_name": lambda: LiteGlobal.update_decryption_key(wrong, bytes(32)),
        "device_id": lambda: setattr(network, "device_id", "x"),
        "stream_id": lambda: setattr(network, "stream_id", -1),
        "nr_threads": lambda: setattr(network, "threads_number", 0),
        "index": lambda: network.get_input_name(wrong),
        "size_limit": lambda: network.set_network_algo_workspace_limit(-1),
    }
    for argument, call in calls.items():
        with pytest.raises(LiteArgumentError, match=argument):
            call()
    check(network, rng)


@pytest.mark.parametrize(
    ("values", "dtype"), [([70000.0], "float16"), ([2**24 + 1], "float32"), ([2049], "float16")]
)
def test_numbers_of_a_list_that_a_tensor_cannot_hold_are_refused(values, dtype):
    tensor = LiteTensor(LiteLayout([1], dtype))
    tensor.fill_zero()
    with pytest.raises(LiteArgumentError, match="values that float"):
        tensor.set_data_by_copy(values)
    assert tensor.to_numpy()[0] == 0
    tensor.set_data_by_copy([0.1])
    assert tensor.to_numpy()[0] == np.dtype(dtype).type(0.1)


def test_a_length_that_does_not_fit_changes_nothing():
    tensor = LiteTensor(LiteLayout([4], "float32"))
    data = np.zeros(8, "float32")
    with pytest.raises(LiteArgumentError, match="length"):
        tensor.set_data_by_copy(ctypes.c_void_p(data.ctypes.data), 5, LiteLayout([8], "float32"))
    assert list(tensor.layout.shapes)[:1] == [4]


class Runner:
    """A network whose callbacks are its owner's methods, and so know it."""

    def __init__(self, model):
        self.ended = threading.Event()
        self.network = loaded(model, config=with_options(var_sanity_check_first_run=0))
        self.network.set_finish_callback(self.finished)

    def finished(self, ios):
        self.ended.set()
        return 0


def test_callbacks_that_know_their_network_do_not_keep_it(layer, rng):
    runner = Runner(layer)
    check(runner.network, rng)
    assert runner.ended.is_set()
    gone = weakref.ref(runner.network)
    del runner
    gc.collect()
    assert gone() is None


def test_a_network_given_up_in_a_run_lets_those_of_its_memory_run(layer, rng):
    first, second = loaded(layer), LiteNetwork()
    second.share_runtime_memroy(first)
    second.load(layer)
    feed(second, rng.standard_normal((4, 8)).astype("float32"))
    second.forward()
    with pytest.raises(LiteBusyError):
        first.forward()
    del second
    gc.collect()
    check(first, rng)


def test_a_network_given_up_in_an_asynchronous_run_runs_to_its_end(heavy, rng):
    """Its callback is called, nobody waits for it, and then it goes, though in the library's own thread."""
    ended, go = threading.Event(), threading.Event()

    def callback():
        go.wait(60)
        ended.set()
        return 0

    network = loaded(heavy, config=with_options(var_sanity_check_first_run=0))
    network.async_with_callback(callback)
    network.get_io_tensor("data").set_data_by_copy(rng.standard_normal((256, 256)).astype("float32") / 16)
    network.forward()
    gone = weakref.ref(network)
    del network
    gc.collect()
    assert gone() is not None  # its end waits for the run's, and nobody for either
    assert not ended.is_set()
    go.set()
    assert ended.wait(60)
    deadline = time.monotonic() + 60
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert gone() is None


def test_a_process_ends_well_with_networks_alive(layer):
    code = f"""
import numpy as np
from dlinfer.vendor.megengine.lite import *
network = LiteNetwork()
network.async_with_callback(lambda: 0)
network.load({str(layer)!r})
network.get_io_tensor("data").fill_zero()
network.get_io_tensor("weight").fill_zero()
network.forward()
view = network.get_io_tensor("data").get_data_by_share()
print(LiteGlobal.get_device_count(LiteDeviceType.LITE_CPU) > 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


def test_bytes_of_a_model_may_go_once_it_is_loaded(layer, rng):
    network = LiteNetwork()
    content = bytearray(layer.read_bytes())
    network.load(bytes(content))
    for index in range(len(content)):
        content[index] = random.Random(0).randrange(256)
    gc.collect()
    check(network, rng)


def test_subnormal_numbers_stay_what_they_are_for_everybody_else(layer, rng):
    """The library lets the thread that loads a model flush them to zero."""
    tiny = np.full(3, 1e-40, "float32")
    for before in (lambda one: one.enable_cpu_inplace_mode(), lambda one: None):
        network = loaded(layer, before)
        assert (tiny * np.float32(1)).all()
        check(network, rng)
        assert (tiny * np.float32(1)).all()
