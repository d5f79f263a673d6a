"""LiteOptions, LiteConfig, LiteIO and LiteNetworkIO, by what the real library does with them."""

import ctypes
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from dlinfer.vendor.megengine.errors import (
    LiteArgumentError,
    LiteError,
    LiteLackError,
    LiteModelError,
)
from dlinfer.vendor.megengine.lite import (
    LiteAlgoSelectStrategy,
    LiteBackend,
    LiteConfig,
    LiteDeviceType,
    LiteIO,
    LiteIOType,
    LiteLayout,
    LiteNetwork,
    LiteNetworkIO,
    LiteOptions,
)
from tests.vendor.megengine.models import expected_layer
from tests.vendor.megengine.observing import Log, Profile, profiled, run_filled
from tests.vendor.megengine.running import TOLERANCE, check, feed, loaded, run, with_options
from tests.workers import ROOT

DOCUMENTED = [
    "weight_preprocess",
    "fuse_preprocess",
    "fake_next_exec",
    "var_sanity_check_first_run",
    "const_shape",
    "force_dynamic_alloc",
    "force_output_dynamic_alloc",
    "force_output_use_user_specified_memory",
    "no_profiling_on_shape_change",
    "jit_level",
    "comp_node_seq_record_level",
    "graph_opt_level",
    "async_exec_level",
    "enable_nchw44",
    "enable_nchw44_dot",
    "enable_nchw88",
    "enable_nhwcd4",
    "enable_nchw4",
    "enable_nchw32",
    "enable_nchw64",
]


def computes(layer, rng, **options: int) -> None:
    """Two runs with other data, right under these options."""
    network = loaded(layer, config=with_options(**options))
    check(network, rng)
    check(network, rng)


def test_the_fields_and_defaults_are_the_documented_ones():
    assert [field[0] for field in LiteOptions._fields_] == DOCUMENTED
    assert ctypes.sizeof(LiteOptions) == 4 * len(DOCUMENTED)
    options = LiteOptions()
    changed = {name: getattr(options, name) for name in DOCUMENTED if getattr(options, name)}
    assert changed == {"var_sanity_check_first_run": 1, "graph_opt_level": 2, "async_exec_level": 1}


def test_what_is_no_option_or_no_value_of_one_is_refused():
    options = LiteOptions()
    for name, value in (("enable_chwn4", 1), ("jit_level", 3), ("const_shape", 2), ("jit_level", "1")):
        with pytest.raises(LiteArgumentError, match=name):
            setattr(options, name, value)


def test_weight_preprocess(constant_convolution, tmp_path):
    """The weights that the model holds are kept as the algorithm wants them; as they were, nobody needs them."""

    def equal_bits(network: LiteNetwork) -> None:  # algorithms that prepare weights
        network.set_network_algo_policy(LiteAlgoSelectStrategy.LITE_ALGO_HEURISTIC, 0, True)

    results = []
    for wanted in (0, 1):
        network = loaded(constant_convolution, equal_bits, with_options(weight_preprocess=wanted))
        weight = "const{64,64,3,3}[2]"
        assert ("MEMORY_NO_NEED" in profiled(network, tmp_path).flags(weight)) == bool(wanted)
        results.append(network.get_io_tensor("result_0").to_numpy())
    np.testing.assert_allclose(
        results[1], results[0], rtol=1e-4, atol=1e-4
    )  # sums of 576 products of about 1


def passes(log: Log) -> list[int]:
    """How many optimisations of the graph the library has applied, each time it did."""
    return [int(one) for one in re.findall(r"graph optimization: applied (\d+) passes", log())]


def test_fuse_preprocess_is_three_more_optimisations(layer, rng, log):
    computes(layer, rng)
    assert passes(log) == [12]
    computes(layer, rng, fuse_preprocess=1)
    assert passes(log) == [12, 3]


def test_fake_next_exec_computes_from_the_second_run_on(layer, rng):
    options = {"fake_next_exec": 1, "var_sanity_check_first_run": 0}
    network = loaded(layer, config=with_options(**options))
    data = np.full((4, 8), 52.5, "float32")  # of no other test: its results lie in no memory
    first = run(network, data)
    assert not np.allclose(first, expected_layer(data))
    check(network, rng)


def test_var_sanity_check_first_run_is_on_where_nothing_is_said(layer, rng):
    """Seen by what it excludes: runs that are recorded to be run without their graph."""
    assert LiteOptions().var_sanity_check_first_run == 1
    computes(layer, rng, var_sanity_check_first_run=0)
    with pytest.raises(LiteModelError, match="var_sanity_check_first_run"):
        loaded(layer, config=with_options(comp_node_seq_record_level=2))
    loaded(layer, config=with_options(comp_node_seq_record_level=2, var_sanity_check_first_run=0))


def test_const_shape(layer, rng, tmp_path):
    for wanted, known in ((0, "RT_STATIC"), (1, "CONST")):
        network = loaded(layer, config=with_options(const_shape=wanted))
        assert profiled(network, tmp_path).size_is("data") == known
    check(network, rng)
    with pytest.raises(LiteError, match="disallowed shape change"):
        check(network, rng, batch=2)


def test_force_dynamic_alloc(layer, rng, tmp_path):
    for wanted in (0, 1):
        network = loaded(layer, config=with_options(force_dynamic_alloc=wanted))
        flags = profiled(network, tmp_path).flags("MatrixMul")
        assert ("RT_FORCE_DYNAMIC_MEM_ALLOC" in flags) == bool(wanted)
    check(network, rng)


@pytest.mark.parametrize("wanted", [0, 1])
def test_force_output_dynamic_alloc(layer, rng, wanted):
    """Each run has memory of its own for its results, of which no copy is made: earlier results stay."""
    network = loaded(layer, config=with_options(force_output_dynamic_alloc=wanted))
    check(network, rng)
    view = network.get_io_tensor("result_0").get_data_by_share()
    first = view.copy()
    check(network, rng)
    assert np.array_equal(view, first) == bool(wanted)


@pytest.mark.parametrize("wanted", [0, 1])
def test_force_output_use_user_specified_memory(layer, rng, tmp_path, wanted):
    network = loaded(layer, config=with_options(force_output_use_user_specified_memory=wanted))
    data, mine = rng.standard_normal((4, 8)).astype("float32"), np.zeros((4, 4), "float32")
    network.enable_profile_performance(tmp_path / "profile.json")
    feed(network, data)
    network.get_io_tensor("result_0").set_data_by_share(mine)
    network.forward()
    network.wait()
    np.testing.assert_allclose(mine, expected_layer(data), **TOLERANCE)
    place = Profile(tmp_path / "profile.json").address("result_0")
    assert (place == mine.ctypes.data) == bool(wanted)  # else it was copied there


@pytest.mark.parametrize("wanted", [0, 1])
def test_no_profiling_on_shape_change(convolution, log, wanted):
    """Sizes that no other test has: the library keeps in the process what it has chosen for some."""

    def profile(network: LiteNetwork) -> None:
        network.set_network_algo_policy(LiteAlgoSelectStrategy.LITE_ALGO_PROFILE)

    network = loaded(convolution, profile, with_options(no_profiling_on_shape_change=wanted))
    run_filled(network, data=[1, 8, 5, 7 + 2 * wanted])
    assert "profiling ConvolutionForward" in log()
    run_filled(network, data=[1, 8, 5, 8 + 2 * wanted])
    assert ("profiling ConvolutionForward" in log()) == (not wanted)


def test_jit_level(layer, rng):
    computes(layer, rng, jit_level=0)
    for level in (1, 2):
        with pytest.raises(LiteLackError, match="No compiler support"):
            loaded(layer, config=with_options(jit_level=level))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_comp_node_seq_record_level(layer, rng, level, log):
    """Levels 1 and 2 record, of which the library warns where sizes may change; level 2 cannot change them any more."""
    options = {"comp_node_seq_record_level": level, "var_sanity_check_first_run": 0}
    network = loaded(layer, lambda one: one.enable_cpu_inplace_mode(), with_options(**options))
    for _ in range(3):
        check(network, rng)
    assert ("Check whether 'const_var_shape' is set" in log()) == (level > 0)
    if level == 2:
        with pytest.raises(LiteError, match="host tensor changed"):
            check(network, rng, batch=2)
    else:
        check(network, rng, batch=2)


@pytest.mark.parametrize(
    ("level", "applied", "operators"), [(0, [], 2), (1, [], 2), (2, [12], 1), (3, None, None)]
)
def test_graph_opt_level(held, level, applied, operators, log, tmp_path):
    """Level 2 makes one op of ``data * 2 + later``. Level 1 changes expressions that are made, not loaded ones."""
    if applied is None:
        with pytest.raises(LiteLackError, match="No compiler support"):
            loaded(held, config=with_options(graph_opt_level=level))
        return
    network = loaded(held, config=with_options(graph_opt_level=level))
    assert passes(log) == applied
    assert profiled(network, tmp_path).operators.count("Elemwise") == operators


@pytest.mark.parametrize("level", [0, 1, 2, 4])
def test_async_exec_level(layer, rng, level, tmp_path):
    network = loaded(layer, config=with_options(async_exec_level=level))
    others = [one for one in profiled(network, tmp_path).threads if "comp_node_dispatch" in one]
    assert bool(others) == (level == 4)
    check(network, rng)


TRANSFORMS = {
    "enable_nchw44": 5,
    "enable_nchw44_dot": 5,
    "enable_nchw88": 5,
    "enable_nhwcd4": 4,
    "enable_nchw4": 6,
    "enable_nchw32": 9,
    "enable_nchw64": 9,
}
"""Layouts and how many optimisations the library applies for them; those of Arm and x86 lay this model out anew."""


ONE_RUN = """
import sys, numpy as np
from tests.vendor.megengine.running import loaded, with_options
network = loaded(sys.argv[1], config=with_options(**{sys.argv[2]: 1}))
for name, sizes in (("data", (1, 8, 16, 16)), ("weight", (8, 8, 3, 3))):
    network.get_io_tensor(name).set_data_by_copy(np.ones(sizes, "float32"))
network.forward()
network.wait()
"""


def returns(model, name: str) -> None:
    """Skip where the library's kernels of a layout never end: those of nchw88 on an AMD EPYC of 2022."""
    if name != "enable_nchw88":
        return
    command = [sys.executable, "-c", ONE_RUN, str(model), name]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=12, cwd=ROOT)
    except subprocess.TimeoutExpired:
        pytest.skip(f"on this CPU MegEngine Lite does not come back from a forward with {name}")


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if name.startswith("enable_")])
def test_layout_transforms(convolution, rng, name, log, tmp_path):
    """A convolution computes the same, but in a layout of which CPUs have no kernels."""
    returns(convolution, name)
    results = []
    inputs = {
        "data": rng.standard_normal((1, 8, 16, 16)).astype("float32"),
        "weight": rng.standard_normal((8, 8, 3, 3)).astype("float32"),
    }
    for options in ({}, {name: 1}):
        network = loaded(convolution, config=with_options(**options))
        network.enable_profile_performance(tmp_path / "profile.json")
        for key, value in inputs.items():
            network.get_io_tensor(key).set_data_by_copy(value)
        assert passes(log) == ([12, TRANSFORMS[name]] if options else [12])
        if "enable_nhwcd4" in options:  # a layout of mobile GPUs
            with pytest.raises(LiteError, match="invalid conv format"):
                network.forward()
            return
        network.forward()
        network.wait()
        results.append(network.get_io_tensor("result_0").to_numpy())
    laid_out_anew = "Dimshuffle" in Profile(tmp_path / "profile.json").operators
    assert laid_out_anew == (name in ("enable_nchw44", "enable_nchw44_dot", "enable_nchw88"))
    # Sums of 72 products of about 1, in another order.
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_the_fields_decide_where_field_list_and_table_differ():
    assert hasattr(LiteOptions, "enable_nchw64")
    assert not hasattr(LiteOptions, "enable_chwn4")


def test_config(layer, held, rng, tmp_path):
    config = LiteConfig()
    documented = [field[0] for field in LiteConfig._fields_ if not field[0].startswith("_")]
    assert documented == [
        "has_compression",
        "device_id",
        "device_type",
        "backend",
        "bare_model_cryption_name",
        "options",
    ]
    assert (config.has_compression, config.device_id, config.device_type) == (0, 0, LiteDeviceType.LITE_CPU)
    assert (config.backend, config.bare_model_cryption_name) == (LiteBackend.LITE_DEFAULT, b"")
    config.bare_model_cryption_name = b"AES_default"
    assert config.bare_model_cryption_name == b"AES_default"
    with pytest.raises(LiteArgumentError, match="optoins"):
        config.optoins = LiteOptions()  # pyright: ignore[reportAttributeAccessIssue]
    config = LiteConfig()
    config.device_id = 2
    network = loaded(layer, config=config)
    assert (network.device_id, profiled(network, tmp_path).places) == (2, {"cpu2:0", "cpu0:0"})
    check(network, rng)
    compressed = LiteConfig()
    compressed.has_compression = 1
    with pytest.raises(LiteModelError, match="cannot be loaded"):
        loaded(held, config=compressed)  # a model with a constant that is not compressed
    elsewhere = LiteConfig()
    elsewhere.device_type = LiteDeviceType.LITE_CUDA
    with pytest.raises(LiteError, match="no LITE_CUDA"):
        loaded(layer, config=elsewhere)
    for name, value in (("device_id", "x"), ("options", 5), ("bare_model_cryption_name", 5)):
        with pytest.raises(LiteArgumentError, match=name):
            setattr(LiteConfig(), name, value)
    unknown: Any = LiteConfig()
    unknown.backend = 1  # for which the library would end the process
    with pytest.raises(LiteArgumentError, match="backend"):
        LiteNetwork(unknown)


def test_io_fields():
    io = LiteIO("data")
    assert (io.name, io.is_host, io.io_type) == ("data", 1, LiteIOType.LITE_IO_VALUE)
    assert io.config_layout == LiteLayout()
    assert [field[0].strip("_") for field in LiteIO._fields_] == [
        "name",
        "is_host",
        "io_type",
        "config_layout",
    ]
    assert {io: 1}[LiteIO(b"data", is_host=False)] == 1
    for name in ("", None, 3):
        with pytest.raises(LiteArgumentError, match="name"):
            LiteIO(name)  # pyright: ignore[reportArgumentType]


def test_io_keywords(layer, rng):
    io = LiteIO("data", is_host=True, io_type=LiteIOType.LITE_IO_VALUE, layout=LiteLayout([2, 8], "float32"))
    network = loaded(layer, io=LiteNetworkIO([io]))
    assert network.get_io_tensor("data").layout.shapes == [2, 8]
    check(network, rng, batch=2)
    shape = LiteIO("result_0", io_type=LiteIOType.LITE_IO_SHAPE)
    network = loaded(layer, io=LiteNetworkIO(outputs=[shape]))
    data = np.full((3, 8), 72.5, "float32")  # of no other test: its results lie in no memory
    assert not np.allclose(run(network, data), expected_layer(data))  # its values are not wanted
    assert network.get_io_tensor("result_0").layout.shapes == [3, 4]


def test_network_io(layer, rng):
    io = LiteNetworkIO([LiteIO("data", is_host=False)], [["result_0", True]])
    io.add_input("weight")
    io.add_output("nobody", is_host=True, layout=LiteLayout([1, 1000]))
    assert [one.name for one in io.inputs] == ["data", "weight"]
    assert [one.name for one in io.outputs] == ["result_0", "nobody"]
    network = loaded(layer, io=io)
    check(network, rng)
    assert network.get_all_output_name() == ["result_0"]
    assert (LiteNetworkIO().inputs, LiteNetworkIO().outputs) == ([], [])
    with pytest.raises(LiteArgumentError, match="LiteIO"):
        LiteNetworkIO(["data"])
