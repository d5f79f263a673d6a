"""LiteNetwork, on the real library."""

import json
import re
import threading
from collections.abc import Callable

import numpy as np
import pytest

from dlinfer.vendor.megengine import lite
from dlinfer.vendor.megengine.errors import (
    LiteArgumentError,
    LiteBusyError,
    LiteError,
    LiteLackError,
)
from dlinfer.vendor.megengine.lite import (
    LiteAlgoSelectStrategy,
    LiteIO,
    LiteNetwork,
    LiteTensorPhase,
)
from tests.vendor.megengine import models
from tests.vendor.megengine.models import WEIGHT, expected_held, expected_layer
from tests.vendor.megengine.observing import profiled, run_filled
from tests.vendor.megengine.running import TOLERANCE, check, feed, loaded, run, with_options


def test_network_construction(layer, rng):
    check(loaded(layer), rng)
    network = LiteNetwork(config=lite.LiteConfig(), io=lite.LiteNetworkIO())
    with pytest.raises(LiteError, match="after model loaded"):
        network.forward()


def test_load(layer, rng):
    for given in (layer, str(layer), layer.read_bytes()):
        network = LiteNetwork()
        network.load(given)
        check(network, rng)


def test_forward_and_wait(layer, rng):
    network = loaded(layer)
    for _ in range(3):
        check(network, rng)


def test_any_batch_runs(layer, rng):
    network = loaded(layer)
    for batch in (4, 1, 33, 2):
        check(network, rng, batch)


@pytest.mark.parametrize("name", ["device_id", "stream_id", "threads_number"])
def test_set_before_load_only(layer, rng, name, tmp_path):
    network = LiteNetwork()
    setattr(network, name, 2)
    assert getattr(network, name) == 2
    network.load(layer)
    place = {"device_id": "cpu2:0", "stream_id": "cpu0:2", "threads_number": "multithread2:0"}[name]
    assert place in profiled(network, tmp_path).places
    check(network, rng)
    with pytest.raises(LiteError, match="before model loaded"):
        setattr(network, name, 1)
    with pytest.raises(LiteArgumentError):
        LiteNetwork().threads_number = 0


def test_names_of_inputs_and_outputs(layer):
    network = loaded(layer)
    inputs = network.get_all_input_name()
    assert sorted(inputs) == ["data", "weight"]
    assert [network.get_input_name(index) for index in range(2)] == inputs
    assert network.get_all_output_name() == [network.get_output_name(0)] == ["result_0"]
    for index in (2, -1):
        with pytest.raises(LiteArgumentError, match="index"):
            network.get_input_name(index)


def test_memory_plan_is_lacking(layer, tmp_path):
    with pytest.raises(LiteLackError, match="this build of the library lacks the function"):
        loaded(layer).get_static_memory_alloc_info(str(tmp_path))


def test_cpu_inplace_mode(layer, rng, tmp_path):
    network = LiteNetwork()
    assert not network.is_cpu_inplace_mode()
    network.enable_cpu_inplace_mode()
    assert network.is_cpu_inplace_mode()
    network.load(layer)
    assert "cpu:default" in profiled(network, tmp_path).places
    check(network, rng)
    with pytest.raises(LiteError, match="before model loaded"):
        network.enable_cpu_inplace_mode()


def test_use_tensorrt(layer, rng):
    """Without a GPU it changes nothing; that it reaches the library shows in what that says after load."""
    network = loaded(layer, lambda one: one.use_tensorrt())
    check(network, rng)
    with pytest.raises(LiteError, match="before model loaded"):
        network.use_tensorrt()


def test_io_tensors_by_name_and_phase(layer):
    network = loaded(layer)
    assert network.get_io_tensor("data").layout.shapes == [4, 8]
    assert network.get_io_tensor("data", LiteTensorPhase.LITE_INPUT).layout.shapes == [4, 8]
    assert network.get_io_tensor("result_0", phase=LiteTensorPhase.LITE_OUTPUT).layout.shapes == [4, 4]
    for name, phase in (("result_0", LiteTensorPhase.LITE_INPUT), ("data", 2), ("nobody", 0)):
        with pytest.raises(LiteError, match=f"tensor name must be {name}"):
            network.get_io_tensor(name, phase)


def test_networks_that_share_weights_run_at_once(heavy, rng):
    """Two threads, each with its network, each with its own data, right results all the time."""
    first = loaded(heavy)
    second = LiteNetwork()
    second.share_weights_with(first)
    data = [rng.standard_normal((256, 256)).astype("float32") / 16 for _ in range(2)]
    alone = [_squared(network, one) for network, one in zip((first, second), data, strict=True)]
    wrong: list[int] = []
    meeting = threading.Barrier(2)

    def work(index: int, network: LiteNetwork) -> None:
        meeting.wait()
        for _ in range(15):
            if not np.array_equal(_squared(network, data[index]), alone[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not np.array_equal(alone[0], alone[1])


def _squared(network: LiteNetwork, data: np.ndarray) -> np.ndarray:
    network.get_io_tensor("data").set_data_by_copy(data)
    network.forward()
    network.wait()
    return network.get_io_tensor("result_0").to_numpy()


def test_the_weights_outlive_the_network_that_loaded_them(held, rng):
    first = loaded(held)
    second = LiteNetwork()
    second.share_weights_with(first)
    del first
    data = rng.standard_normal((4, 4)).astype("float32")
    np.testing.assert_allclose(_squared(second, data), expected_held(data), **TOLERANCE)
    with pytest.raises(LiteError, match="loaded"):
        LiteNetwork().share_weights_with(LiteNetwork())
    with pytest.raises(LiteArgumentError, match="a LiteNetwork"):
        second.share_weights_with("first")  # pyright: ignore[reportArgumentType]


def test_networks_that_share_memory_take_turns(layer, rng, tmp_path):
    first, other = loaded(layer), loaded(layer)
    second = LiteNetwork()
    second.share_runtime_memroy(first)
    second.load(layer)
    places = [profiled(one, tmp_path).address("MatrixMul") for one in (first, second, other)]
    assert places[0] == places[1] != places[2]
    for network in (first, second, first):
        check(network, rng)
    with pytest.raises(LiteError, match="before model loaded"):
        second.share_runtime_memroy(first)


def test_running_both_at_once_is_refused(layer, rng):
    """Refused by forward, and right again once the first has ended."""
    first = loaded(layer)
    second = LiteNetwork()
    second.share_runtime_memroy(first)
    second.load(layer)
    data = rng.standard_normal((4, 8)).astype("float32")
    for network in (first, second):
        feed(network, data)
    first.forward()
    with pytest.raises(LiteBusyError, match="shares run-time memory"):
        second.forward()
    first.wait()
    np.testing.assert_allclose(first.get_io_tensor("result_0").to_numpy(), expected_layer(data), **TOLERANCE)
    check(second, rng)
    third = LiteNetwork()
    third.share_runtime_memroy(second)
    third.load(layer)
    feed(third, data)
    first.forward()
    with pytest.raises(LiteBusyError):
        third.forward()
    with pytest.raises(LiteBusyError):
        LiteNetwork().share_runtime_memroy(first)
    first.wait()
    check(third, rng)


def test_async_with_callback(heavy, rng):
    ended, here = threading.Event(), threading.get_ident()
    where: list[int] = []

    def callback() -> int:
        where.append(threading.get_ident())
        ended.set()
        return 0

    data = rng.standard_normal((256, 256)).astype("float32") / 16
    expected = _squared(loaded(heavy), data)
    network = loaded(heavy, config=with_options(var_sanity_check_first_run=0))
    network.async_with_callback(callback)
    for runs in (1, 2):
        ended.clear()
        network.get_io_tensor("data").set_data_by_copy(data)
        network.forward()
        assert ended.wait(300)
        network.wait()
        assert np.array_equal(network.get_io_tensor("result_0").to_numpy(), expected)
        assert len(where) == runs
    assert here not in where


def test_what_cannot_end_is_refused(layer):
    network = loaded(layer, config=with_options(force_output_dynamic_alloc=1))
    network.async_with_callback(lambda: 0)
    with pytest.raises(LiteError, match="does not call the callback"):
        network.forward()


@pytest.mark.parametrize("setting", ["set_start_callback", "set_finish_callback"])
def test_start_callback_and_finish_callback(layer, rng, setting):
    seen: list[dict[str, np.ndarray]] = []

    def callback(ios: dict[LiteIO, lite.LiteTensor]) -> int:
        assert all(isinstance(io, LiteIO) for io in ios)
        seen.append({io.name: tensor.to_numpy() for io, tensor in ios.items()})
        return 0

    network = loaded(layer)
    getattr(network, setting)(callback)
    data = rng.standard_normal((4, 8)).astype("float32")
    result = run(network, data)
    if setting == "set_start_callback":
        assert sorted(seen[0]) == ["data", "weight"]
        assert np.array_equal(seen[0]["data"], data)
        assert np.array_equal(seen[0]["weight"], WEIGHT)
    else:
        assert list(seen[0]) == ["result_0"]
        assert np.array_equal(seen[0]["result_0"], result)
    run(network, data)
    assert len(seen) == 2
    with pytest.raises(LiteArgumentError, match="a function"):
        getattr(network, setting)(5)


def test_callbacks_of_many_networks_do_not_mix(layer, rng):
    calls: list[int] = []

    def callback_of(index: int) -> Callable[[object], int]:
        def callback(ios: object) -> int:
            calls.append(index)
            return 0

        return callback

    networks = [loaded(layer) for _ in range(5)]
    for index, network in enumerate(networks):
        network.set_finish_callback(callback_of(index))
    for index in (3, 0, 4, 1, 2):
        check(networks[index], rng)
    assert calls == [3, 0, 4, 1, 2]


def test_profile(layer, rng, tmp_path):
    network = loaded(layer)
    network.enable_profile_performance(str(tmp_path / "profile.json"))
    check(network, rng)
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert {"graph_exec", "profiler"} <= set(profile)
    assert "MatrixMul" in json.dumps(profile)
    with pytest.raises(LiteArgumentError, match="in an existing folder"):
        network.enable_profile_performance(tmp_path / "nowhere" / "profile.json")


def test_workspace_limit(convolution, tmp_path):
    """Sizes that no other test has: the library keeps in the process what it has chosen for some."""
    for rows, limit, enough in ((21, 2**40, True), (22, 0, False)):
        network = loaded(convolution)
        network.set_network_algo_workspace_limit(limit)
        assert (profiled(network, tmp_path, data=[1, 8, rows, 5]).workspace() > 0) == enough
    with pytest.raises(LiteError, match="after it has been accessed"):
        network.set_network_algo_workspace_limit(2**40)
    with pytest.raises(LiteArgumentError, match="size_limit"):
        network.set_network_algo_workspace_limit(-1)
    with pytest.raises(LiteError, match="after model loaded"):
        LiteNetwork().set_network_algo_workspace_limit(5)


_S = LiteAlgoSelectStrategy


@pytest.mark.parametrize(
    "policy",
    [
        _S.LITE_ALGO_HEURISTIC | _S.LITE_ALGO_PROFILE,
        _S.LITE_ALGO_HEURISTIC | _S.LITE_ALGO_REPRODUCIBLE,
        _S.LITE_ALGO_PROFILE | _S.LITE_ALGO_REPRODUCIBLE,
        _S.LITE_ALGO_PROFILE | _S.LITE_ALGO_OPTIMIZED,
        _S.LITE_ALGO_PROFILE | _S.LITE_ALGO_OPTIMIZED | _S.LITE_ALGO_REPRODUCIBLE,
        _S.LITE_ALGO_HEURISTIC,
        _S.LITE_ALGO_PROFILE,
    ],
)
def test_algorithm_policies(layer, log, policy):
    network = loaded(layer, lambda one: one.set_network_algo_policy(policy, 0, False))
    run_filled(network, data=[300 + policy, 8])  # sizes that no other test has
    names = [
        name
        for bit, name in enumerate(("HEURISTIC", "PROFILE", "REPRODUCIBLE", "OPTIMIZED"))
        if policy >> bit & 1
    ]
    said = log()
    assert f"Use Stragegy :{' '.join(names)} \n" in said  # as the library spells it
    assert ("profiling MatrixMul" in said) == (policy & 3 == _S.LITE_ALGO_PROFILE)


def test_strategies():
    values = {one.name.removeprefix("LITE_ALGO_"): one.value for one in LiteAlgoSelectStrategy}
    assert values == {"HEURISTIC": 1, "PROFILE": 2, "REPRODUCIBLE": 4, "OPTIMIZED": 8}
    for wrong in (0, 16, "fast"):
        with pytest.raises(LiteArgumentError, match="policy"):
            LiteNetwork().set_network_algo_policy(wrong)  # pyright: ignore[reportArgumentType]


def test_equal_samples_of_a_batch_give_equal_bits(convolution, log):
    """Algorithms whose results depend on the place in a batch are left out of the choice."""

    def choose(network: LiteNetwork) -> None:
        network.set_network_algo_policy(_S.LITE_ALGO_PROFILE, binary_equal_between_batch=True)

    network = loaded(convolution, choose)
    run_filled(network, data=[4, 8, 3, 5])
    assert "not contain attribute(ACCURACY_DEPEND_ON_BATCH)" in log()
    result = network.get_io_tensor("result_0").to_numpy()
    assert all(np.array_equal(one, result[0]) for one in result)


def test_the_best_is_chosen_by_the_shared_batch_size(layer, log):
    network = loaded(
        layer, lambda one: one.set_network_algo_policy(_S.LITE_ALGO_PROFILE, shared_batch_size=3)
    )
    run_filled(network, data=[331, 8])
    batches = set(re.findall(r"profiling MatrixMul\w* algorithm \S+ \({(\d+)\(", log()))
    assert "3" in batches
    assert "331" not in batches
    with pytest.raises(LiteArgumentError, match="shared_batch_size"):
        network.set_network_algo_policy(_S.LITE_ALGO_PROFILE, shared_batch_size=-1)


def test_io_txt_dump(layer, rng, tmp_path):
    network = loaded(layer)
    network.io_txt_dump(str(tmp_path / "io.txt"))
    check(network, rng)
    text = (tmp_path / "io.txt").read_text()
    assert "MatrixMul" in text
    assert "data" in text


def test_io_bin_dump(layer, rng, tmp_path):
    network = loaded(layer)
    network.io_bin_dump(str(tmp_path / "new" / "io"))
    data = rng.standard_normal((4, 8)).astype("float32")
    run(network, data)
    files = [path.read_bytes() for path in (tmp_path / "new" / "io").iterdir()]
    assert any(data.tobytes() in content for content in files)


def test_models_with_two_results(tmp_path):
    network = LiteNetwork()
    network.load(models.two_results())
    data = np.arange(6, dtype="float32").reshape(2, 3)
    network.get_io_tensor("data").set_data_by_copy(data)
    network.forward()
    network.wait()
    assert np.array_equal(network.get_io_tensor("result_0").to_numpy(), data + 1)
    assert np.array_equal(network.get_io_tensor("result_1").to_numpy(), data * 3)
