"""Callbacks: what they raise, how long they and their network live, and the numbers that they compute with."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from dlinfer.vendor.megengine.errors import LiteBusyError, LiteCallbackError, LiteError
from dlinfer.vendor.megengine.lite import LiteIO, LiteNetwork, LiteTensor
from tests.vendor.megengine.models import expected_layer
from tests.vendor.megengine.running import TOLERANCE, check, feed, loaded, run, with_options

SECONDS = 300
"""What is waited for at most; it comes about much sooner."""


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


@pytest.mark.parametrize("call", ["forward", "wait"])
@pytest.mark.parametrize("kind", ["async_with_callback", "set_start_callback", "set_finish_callback"])
def test_a_callback_that_runs_its_own_network_or_waits_for_it_is_told(layer, rng, kind, call):
    """It would wait for itself, or call itself for ever."""
    network, fault = loaded(layer, config=with_options(var_sanity_check_first_run=0)), [True]
    getattr(network, kind)(lambda *ios: getattr(network, call)() if fault[0] else 0)
    with pytest.raises(LiteCallbackError, match=f"{call}: a callback of the network"):
        run(network, np.ones((4, 8), "float32"))
    fault[0] = False
    check(network, rng)


def test_an_asynchronous_run_ends_with_its_finish_callback(layer):
    """``wait`` waits for it, and raises what it raises."""
    network = loaded(layer, config=with_options(var_sanity_check_first_run=0))
    network.async_with_callback(lambda: 0)
    seen: list[bool] = []

    def late(ios: object) -> None:
        time.sleep(0.2)
        seen.append(True)
        raise Broken("at the end")

    network.set_finish_callback(late)
    feed(network, np.ones((4, 8), "float32"))
    network.forward()
    with pytest.raises(LiteCallbackError, match=r"set_finish_callback .* Broken: at the end"):
        network.wait()
    assert seen == [True]


def test_there_is_no_profile_of_asynchronous_runs(layer, tmp_path):
    """The library writes it after the callback has told of the end, and the network's end would wait for ever."""
    profiled, asynchronous = loaded(layer), loaded(layer)
    profiled.enable_profile_performance(tmp_path / "profile.json")
    with pytest.raises(LiteError, match="only runs that end with wait"):
        profiled.async_with_callback(lambda: 0)
    asynchronous.async_with_callback(lambda: 0)
    with pytest.raises(LiteError, match="only runs that end with wait"):
        asynchronous.enable_profile_performance(tmp_path / "profile.json")


def test_memory_that_a_callback_shares_is_kept_for_the_run(layer, rng):
    network, alive = loaded(layer), []
    data = rng.standard_normal((4, 8)).astype("float32")

    def sharing(ios: dict[LiteIO, LiteTensor]) -> None:
        mine = data.copy()
        alive.append(weakref.ref(mine))
        next(tensor for io, tensor in ios.items() if io.name == "data").set_data_by_share(mine)

    network.set_start_callback(sharing)
    result = run(network, np.zeros((4, 8), "float32"))
    np.testing.assert_allclose(result, expected_layer(data), **TOLERANCE)
    gc.collect()
    assert alive[0]() is not None  # the library still has its address


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
        assert go.wait(SECONDS)
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
    assert ended.wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert gone() is None


TINY = np.full(3, 1e-40, "float32")
"""Subnormal numbers, which the library flushes to zero in the threads that load and run models."""


def test_subnormal_numbers_stay_what_they_are_for_everybody_else(layer, rng):
    """The library lets the thread that loads a model flush them to zero."""
    for before in (lambda one: one.enable_cpu_inplace_mode(), lambda one: None):
        network = loaded(layer, before)
        assert (TINY * np.float32(1)).all()
        check(network, rng)
        assert (TINY * np.float32(1)).all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_subnormal_numbers_stay_what_they_are_in_callbacks(layer, rng, asynchronous):
    """Those of an asynchronous run are called in a thread of the library."""
    seen: dict[str, tuple[bool, bool]] = {}

    def noting(name: str) -> None:
        seen[name] = bool((TINY * np.float32(1)).all()), threading.get_ident() == here

    here, network = threading.get_ident(), loaded(layer, config=with_options(var_sanity_check_first_run=0))
    network.set_finish_callback(lambda ios: noting("finish"))
    if asynchronous:
        network.async_with_callback(lambda: noting("async"))
    feed(network, rng.standard_normal((4, 8)).astype("float32"))
    network.forward()
    network.wait()
    deadline = time.monotonic() + SECONDS
    while "finish" not in seen and time.monotonic() < deadline:  # it is called after the other
        time.sleep(0.01)
    assert seen.keys() == ({"async", "finish"} if asynchronous else {"finish"})
    assert set(seen.values()) == {(True, not asynchronous)}
