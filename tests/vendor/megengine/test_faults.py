"""What goes wrong is a clear error, never the end of the process, and the next run works (line 4)."""

import gc
import random
import subprocess
import sys
import weakref

import numpy as np
import pytest

from dlinfer.vendor.megengine.errors import LiteArgumentError, LiteError, LiteModelError
from dlinfer.vendor.megengine.lite import LiteNetwork
from tests.resident import ROUNDS, least_growth, resident
from tests.vendor.megengine.running import check, loaded


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
    for again in (lambda: network.load(held), lambda: network.share_weights_with(loaded(held))):
        with pytest.raises(LiteError, match="create another LiteNetwork"):
            again()
    check(network, rng)
    sharing = LiteNetwork()
    sharing.share_weights_with(network)
    for again in (lambda: sharing.load(held), lambda: sharing.share_weights_with(network)):
        with pytest.raises(LiteError, match="create another LiteNetwork"):
            again()
    check(sharing, rng)
    network = LiteNetwork()
    with pytest.raises(LiteModelError):
        network.load(layer.read_bytes()[:-20])
    with pytest.raises(LiteError, match="create another LiteNetwork"):
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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False
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


@pytest.mark.full
def test_two_hundred_loads_and_unloads_leak_nothing(layer, rng):
    """Networks are made, loaded, run and dropped; what the first ones leave is the library's own memory."""

    def some_loads(count: int = 200 // ROUNDS) -> None:
        for _ in range(count):
            check(loaded(layer), rng)
        gc.collect()

    some_loads(20)
    (grown,) = least_growth(lambda: (resident(),), some_loads)
    print(f"{grown >> 10} KiB more after each {200 // ROUNDS} loads and unloads, or more")
    assert grown < (2 << 20) // ROUNDS  # a network that stayed would be 60 KiB and more


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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False
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
