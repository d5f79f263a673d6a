"""Runs that are recorded (comp_node_seq_record_level): what would end or hang the process in the library is refused."""

import pytest

from dlinfer.vendor.megengine.errors import LiteError
from dlinfer.vendor.megengine.lite import LiteNetwork
from tests.vendor.megengine.running import check, loaded, with_options


def recorded(path, level: int) -> LiteNetwork:
    options = with_options(comp_node_seq_record_level=level, var_sanity_check_first_run=0)
    return loaded(path, lambda one: one.enable_cpu_inplace_mode(), options)


def sharing(path) -> LiteNetwork:
    network = LiteNetwork(with_options(comp_node_seq_record_level=2, var_sanity_check_first_run=0))
    network.enable_cpu_inplace_mode()
    network.share_weights_with(loaded(path))
    return network


@pytest.mark.parametrize("made", [lambda path: recorded(path, 2), sharing], ids=["loaded", "sharing"])
def test_calls_that_need_the_graph_are_refused_once_it_is_freed(layer, rng, made):
    network, other = made(layer), LiteNetwork()
    assert network.get_output_name(0) == "result_0"
    check(network, rng)
    calls = {
        "get_output_name": lambda: network.get_output_name(0),
        "share_runtime_memroy": lambda: other.share_runtime_memroy(network),
        "set_network_algo_workspace_limit": lambda: network.set_network_algo_workspace_limit(5),
        "set_network_algo_policy": lambda: network.set_network_algo_policy(1),
    }
    for name, call in calls.items():
        with pytest.raises(LiteError, match=f"{name}: comp_node_seq_record_level=2 freed the graph"):
            call()
    assert network.get_all_output_name() == ["result_0"]
    check(network, rng)


@pytest.mark.parametrize("level", [1, 2])
def test_there_is_no_profile_of_recorded_runs(layer, tmp_path, level):
    network = recorded(layer, level)
    with pytest.raises(LiteError, match=r"recorded .* have no profile"):
        network.enable_profile_performance(tmp_path / "profile.json")


def test_dumps_are_of_runs_that_keep_their_graph(layer, rng, tmp_path):
    network = recorded(layer, 1)
    network.io_txt_dump(tmp_path / "io.txt")
    check(network, rng)
    assert "MatrixMul" in (tmp_path / "io.txt").read_text()
    for call in ("io_txt_dump", "io_bin_dump"):
        with pytest.raises(LiteError, match=f"{call}: .*dump nothing"):
            getattr(recorded(layer, 2), call)(tmp_path / "nothing")
