"""Which CPUs, threads and memory each rank of a host gets, on made-up machines, and that a process keeps to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer.vendor.cpu.host import shares
from dlinfer.vendor.cpu.host.memory import UsableMemory


def machine(root: Path, nodes: list[str], cpus: int, siblings: int = 1, quota: str = "max") -> Path:
    """A machine with the CPUs of each node; CPUs ``cpus / siblings`` apart share a core."""
    cores = cpus // siblings
    texts = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/cpu.max": f"{quota} 100000",
        "sys/devices/system/cpu/online": f"0-{cpus - 1}",
    }
    for number, listed in enumerate(nodes):
        texts[f"sys/devices/system/node/node{number}/cpulist"] = listed
    for number in range(cpus):
        same = ",".join(str(number % cores + cores * i) for i in range(siblings))
        texts[f"sys/devices/system/cpu/cpu{number}/topology/core_cpus_list"] = same
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.strip() + "\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "cpus", "siblings", "quota", "count", "wanted"),
    [
        # a node each
        (["0-3,8-11", "4-7,12-15"], 16, 2, "max", 2, [("0-3,8-11", 4, 0), ("4-7,12-15", 4, 1)]),
        # two ranks a node
        (["0-3", "4-7"], 8, 1, "max", 4, [("0-1", 2, 0), ("2-3", 2, 0), ("4-5", 2, 1), ("6-7", 2, 1)]),
        # two nodes a rank
        (["0-1", "2-3", "4-5", "6-7"], 8, 1, "max", 2, [("0-3", 4, None), ("4-7", 4, None)]),
        # ranks that do not divide into nodes
        (["0-3", "4-7"], 8, 1, "max", 3, [("0-1", 2, 0), ("2-4", 3, None), ("5-7", 3, 1)]),
        # one node: no memory policy; threads of a core stay together
        (["0-7"], 8, 2, "max", 2, [("0-1,4-5", 2, None), ("2-3,6-7", 2, None)]),
        # a quota bounds threads, not CPUs
        (["0-7"], 8, 1, "300000", 2, [("0-3", 1, None), ("4-7", 1, None)]),
        # more ranks than cores
        (["0-1"], 2, 1, "max", 3, [("0-1", 1, None)] * 3),
    ],
)
def test_shares(tmp_path, monkeypatch, nodes, cpus, siblings, quota, count, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    root = machine(tmp_path, nodes, cpus, siblings, quota)
    given = [shares.share_of(index, count, root) for index in range(count)]
    assert [(one.threads, one.node) for one in given] == [(threads, node) for _, threads, node in wanted]
    for one, (listed, _, _) in zip(given, wanted, strict=True):
        ends = [part.partition("-") for part in listed.split(",")]
        assert one.cpus == {cpu for a, _, b in ends for cpu in range(int(a), int(b or a) + 1)}


CODE = """
import os, threading, torch
from dlinfer.vendor.cpu.host import shares
ready, end = threading.Event(), threading.Event()
seen = []
def other():
    ready.set(); end.wait(); seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=other); thread.start(); ready.wait()
cpus = sorted(os.sched_getaffinity(0))
shares.take(shares.Share(frozenset(cpus[:1]), 1, 0))
end.set(); thread.join()
assert seen == [{cpus[0]}] == [os.sched_getaffinity(0)], seen
assert torch.get_num_threads() == {threads}, torch.get_num_threads()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_process_keeps_to_its_share():
    environment = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    run = [sys.executable, "-c", CODE.replace("{threads}", "1")]
    subprocess.run(run, env=environment, check=True)


def test_the_users_threads_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(shares.torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(shares.torch, "set_num_threads", lambda _: pytest.fail("set"))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("set"), raising=False)
    shares.take(shares.Share(frozenset({0, 1}), 2, None))


def test_memory_of_a_rank(monkeypatch):
    """Half of what was free at the start, less what this rank has taken, whatever the other took meanwhile."""
    free, own = [1000], [100]
    monkeypatch.setattr(shares, "usable_memory", lambda: UsableMemory(free[0], 4000, "here"))
    monkeypatch.setattr(shares, "_own_memory", lambda: own[0])
    share = shares.MemoryShare(2)
    assert share.usable() == UsableMemory(500, 2000, "here, for 2 ranks")
    free[0] = 600  # the other took 400
    assert share.usable().available == 500
    own[0], free[0] = 400, 300
    assert share.usable().available == 200
    own[0] = 900
    assert share.usable().available == 0
    free[0], own[0] = 50, 100  # another program took the rest
    assert share.usable().available == 50
