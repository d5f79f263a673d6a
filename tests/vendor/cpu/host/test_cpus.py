"""How many CPUs this process may use, on made-up machines, and under a real quota where a cgroup can be made."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlinfer.vendor.cpu.host.cpus import usable_cpus

V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two nodes of 4 cores with two threads each: CPUs 0-3 and 8-11 are node 0."""

    def build(
        affinity: set[int], cgroup: str = "0::/\n", mounts: str = V2, files: dict[str, str] | None = None
    ) -> Path:
        texts = {
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": mounts,
            "sys/devices/system/cpu/online": "0-15",
            "sys/devices/system/node/node0/cpulist": "0-3,8-11",
            "sys/devices/system/node/node1/cpulist": "4-7,12-15",
        }
        for number in range(16):
            siblings = f"{number % 8},{number % 8 + 8}"
            texts[f"sys/devices/system/cpu/cpu{number}/topology/core_cpus_list"] = siblings
        texts |= {f"sys/fs/cgroup/{name}": text for name, text in (files or {}).items()}
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text.strip()}\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: affinity)
        return tmp_path

    return build


def test_a_thread_for_each_core(machine):
    cpus = usable_cpus(machine(set(range(16))))
    assert (cpus.cores, cpus.nodes, cpus.quota, cpus.threads) == (8, 2, None, 8)
    assert str(cpus) == "8 cores, 2 NUMA nodes: 8 threads"


def test_affinity(machine):
    cpus = usable_cpus(machine({0, 1, 8}))
    assert str(cpus) == "2 cores, 3 of 16 logical CPUs, 1 NUMA node: 2 threads"


@pytest.mark.parametrize(
    ("cpu_max", "quota", "threads"),
    [
        ("400000 100000", 4, 4),
        ("150000 100000", 1.5, 2),
        ("10000 100000", 0.1, 1),
        ("6400000 100000", 64, 8),
        ("max 100000", None, 8),
    ],
)
def test_quota_v2(machine, cpu_max, quota, threads):
    root = machine(set(range(16)), "0::/pod/one\n", files={"pod/one/cpu.max": cpu_max})
    cpus = usable_cpus(root)
    assert (cpus.quota, cpus.threads) == (quota, threads)


def test_the_tightest_ancestor_binds(machine):
    files = {
        "pod/cpu.max": "200000 100000",
        "pod/one/cpu.max": "400000 100000",
        "pod/one/x/cpu.max": "max 100000",
    }
    cpus = usable_cpus(machine(set(range(16)), "0::/pod/one/x\n", files=files))
    assert str(cpus) == "8 cores, quota 2 CPUs, 2 NUMA nodes: 2 threads"


@pytest.mark.parametrize(("quota", "threads"), [("300000", 3), ("-1", 8)])
def test_quota_v1(machine, quota, threads):
    files = {"cpu/jobs/cpu.cfs_quota_us": quota, "cpu/jobs/cpu.cfs_period_us": "100000"}
    cgroup = "4:cpu,cpuacct:/jobs\n2:memory:/other\n"
    assert usable_cpus(machine(set(range(16)), cgroup, V1, files)).threads == threads


def test_without_proc_and_sys(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert usable_cpus(tmp_path).threads == 2


@pytest.fixture
def quota_of_one() -> Iterator[Path]:
    """A real cgroup that allows one CPU."""
    folders = {"/sys/fs/cgroup/cpu": "v1", "/sys/fs/cgroup": "v2"}
    for parent, version in folders.items():
        group = Path(parent, f"dlinfer-test-{os.getpid()}")
        name, text = ("cpu.cfs_quota_us", "100000") if version == "v1" else ("cpu.max", "100000 100000")
        try:
            group.mkdir()
            if (group / name).exists():
                (group / name).write_text(text)
                yield group
                return
        except OSError:
            continue
        finally:
            if group.is_dir():
                group.rmdir()
    pytest.skip("no cgroup with a CPU quota can be made here: that takes root and the controller cpu")


def test_threads_under_a_real_quota(quota_of_one):
    """torch starts as many threads as there are cores; the cpu vendor's first kernel lowers them."""
    code = (
        "import torch, dlinfer; before = torch.get_num_threads();"
        "dlinfer.ops.silu_and_mul(torch.ones(2, 8)); print(before, torch.get_num_threads())"
    )
    enter = f"echo $$ > {quota_of_one}/cgroup.procs && exec {sys.executable} -c '{code}'"
    free = {name: text for name, text in os.environ.items() if not name.endswith("NUM_THREADS")}
    run = subprocess.run(["sh", "-c", enter], env=free, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(usable_cpus().cores), "1"]
