"""Replicas share out nodes, cores and a quota."""

import json
import os
import subprocess
import sys

import pytest

from dlinfer.serve.child import command
from dlinfer.serve.errors import ReplicaCountError
from dlinfer.serve.placement import Placement, place

# Two nodes of four cores with two threads each.
NODES = {(cpu, cpu + 8): cpu // 4 for cpu in range(8)}


def test_one_replica_for_each_node():
    assert place(NODES, None, None) == [
        Placement((0, 1, 2, 3, 8, 9, 10, 11), 4, 0),
        Placement((4, 5, 6, 7, 12, 13, 14, 15), 4, 1),
    ]


@pytest.mark.parametrize("replicas", range(1, 9))
def test_replicas_share_all_cores_and_no_cpu(replicas: int):
    placements = place(NODES, None, replicas)
    assert len(placements) == replicas
    assert sorted(cpu for placement in placements for cpu in placement.cpus) == list(range(16))
    assert sum(placement.threads for placement in placements) == 8
    for node in (0, 1):
        threads = [placement.threads for placement in placements if placement.node == node]
        assert not threads or max(threads) - min(threads) <= 1
    for placement in placements:
        nodes = {node for core, node in NODES.items() if core[0] in placement.cpus}
        assert placement.node == (nodes.pop() if len(nodes) == 1 else None)


def test_a_quota_is_shared():
    assert [placement.threads for placement in place(NODES, 5.0, 2)] == [2, 2]
    assert [placement.threads for placement in place(NODES, 0.5, 2)] == [1, 1]


def test_a_machine_without_nodes():
    assert place({(0,): 0, (1,): 0}, None, None) == [Placement((0, 1), 2)]


def test_more_replicas_than_cores():
    with pytest.raises(ReplicaCountError, match=r"--replicas 9 .* may use only 8"):
        place(NODES, None, 9)


def test_a_placement_as_text():
    placement = Placement((0, 1, 2, 8), 2, 1)
    assert str(placement) == "2 threads on CPUs 0-2,8, NUMA node 1"
    assert Placement.decode(placement.encode()) == placement
    assert Placement.decode(Placement((3,), 1).encode()) == Placement((3,), 1)


def test_a_command_is_bound():
    """To CPUs and a number of threads. The memory policy is asked for; a container may forbid it."""
    cpu = max(os.sched_getaffinity(0))
    tell = (
        "import json, os; print(json.dumps([list(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = command(Placement((cpu,), 1, 0), sys.executable, "-c", tell)
    ended = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    assert json.loads(ended.stdout) == [[cpu], "1"]


def test_a_command_without_a_placement():
    ended = subprocess.run(command(None, "echo", "hello"), check=True, capture_output=True, text=True)
    assert ended.stdout == "hello\n"
