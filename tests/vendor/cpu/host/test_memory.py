"""What memory this process may use, on made-up machines: the kernel's files under a temporary root."""

import ast
import sys
from pathlib import Path

import pytest

from dlinfer.vendor.cpu import host
from dlinfer.vendor.cpu.host.memory import bounds, usable_memory

GIB = 1024**3
HOST_TOTAL, HOST_AVAILABLE = 64 * GIB, 40 * GIB
V2_MOUNT = "31 23 0:28 {mounted} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime shared:15 - cgroup cgroup rw,memory"
V1_OTHER = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"


@pytest.fixture
def machine(tmp_path: Path):
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def build(cgroup: str, mounts: list[str], files: dict[str, object]) -> Path:
        kib = 1024
        write(
            "proc/meminfo",
            f"MemTotal: {HOST_TOTAL // kib} kB\nMemFree: 5 kB\nMemAvailable: {HOST_AVAILABLE // kib} kB\n",
        )
        write("proc/self/cgroup", cgroup)
        write("proc/self/mountinfo", "\n".join(mounts))
        for path, value in files.items():
            write(f"sys/fs/cgroup/{path}", f"{value}\n")
        return tmp_path

    return build


def v2(
    folder: str, limit: object, current: int, inactive: int = 0, high: object = "max"
) -> dict[str, object]:
    prefix = f"{folder}/" if folder else ""
    return {
        f"{prefix}memory.max": limit,
        f"{prefix}memory.high": high,
        f"{prefix}memory.current": current,
        f"{prefix}memory.stat": f"anon 5\nactive_file 9\ninactive_file {inactive}",
    }


def v1(folder: str, limit: int, usage: int, inactive: int = 0) -> dict[str, object]:
    prefix = f"memory/{folder}/" if folder else "memory/"
    return {
        f"{prefix}memory.limit_in_bytes": limit,
        f"{prefix}memory.usage_in_bytes": usage,
        f"{prefix}memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}",
    }


def test_no_limit_is_the_host(machine):
    root = machine("0::/user/me\n", [V2_MOUNT.format(mounted="/")], v2("user/me", "max", 3 * GIB))
    assert usable_memory(root) == (HOST_AVAILABLE, HOST_TOTAL, "host, MemAvailable of /proc/meminfo")


def test_v2_limit_counts_inactive_page_cache_as_free(machine):
    root = machine(
        "0::/user/me\n", [V2_MOUNT.format(mounted="/")], v2("user/me", 8 * GIB, 6 * GIB, inactive=2 * GIB)
    )
    assert usable_memory(root) == (4 * GIB, 8 * GIB, "cgroup v2, /sys/fs/cgroup/user/me/memory.max")


def test_v2_throttling_limit_binds(machine):
    root = machine("0::/user/me\n", [V2_MOUNT.format(mounted="/")], v2("user/me", 8 * GIB, GIB, high=3 * GIB))
    assert usable_memory(root) == (2 * GIB, 3 * GIB, "cgroup v2, /sys/fs/cgroup/user/me/memory.high")


def test_v2_limit_of_an_ancestor_binds(machine):
    files = v2("user/me", "max", GIB) | v2("user", 4 * GIB, 3 * GIB)
    root = machine("0::/user/me\n", [V2_MOUNT.format(mounted="/")], files)
    assert usable_memory(root) == (GIB, 4 * GIB, "cgroup v2, /sys/fs/cgroup/user/memory.max")


def test_the_least_available_wins_not_the_least_limit(machine):
    files = v2("user/me", 4 * GIB, 1 * GIB) | v2("user", 16 * GIB, 15 * GIB)
    root = machine("0::/user/me\n", [V2_MOUNT.format(mounted="/")], files)
    assert usable_memory(root).limit == 16 * GIB
    assert [bound.limit for bound in bounds(root)] == [HOST_TOTAL, 4 * GIB, 16 * GIB]


def test_v2_container_with_a_namespace_of_its_own(machine):
    root = machine("0::/\n", [V2_MOUNT.format(mounted="/")], v2("", 2 * GIB, GIB))
    assert usable_memory(root) == (GIB, 2 * GIB, "cgroup v2, /sys/fs/cgroup/memory.max")


@pytest.mark.parametrize("path", ["/docker/abc", "/../../system/thing"])
def test_v2_container_whose_mount_starts_inside_the_hierarchy(machine, path):
    root = machine(f"0::{path}\n", [V2_MOUNT.format(mounted="/docker/abc")], v2("", 2 * GIB, GIB))
    assert usable_memory(root).limit == 2 * GIB


def test_v1_limit(machine):
    root = machine(
        "9:name=systemd:/\n4:cpu,memory:/jobs/7\n1:cpuset:/\n",
        [V1_OTHER, V1_MOUNT.format(mounted="/")],
        v1("jobs/7", 6 * GIB, 5 * GIB, inactive=GIB),
    )
    assert usable_memory(root) == (
        2 * GIB,
        6 * GIB,
        "cgroup v1, /sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes",
    )


def test_v1_without_a_limit_shows_a_huge_number(machine):
    root = machine("4:memory:/\n", [V1_MOUNT.format(mounted="/")], v1("", 9223372036854771712, GIB))
    assert bounds(root) == [usable_memory(root)]
    assert usable_memory(root).limit == HOST_TOTAL


def test_v1_container_whose_mount_starts_inside_the_hierarchy(machine):
    root = machine("4:memory:/docker/abc\n", [V1_MOUNT.format(mounted="/docker/abc")], v1("", GIB, GIB // 4))
    assert usable_memory(root)[:2] == (3 * GIB // 4, GIB)


def test_hybrid_hierarchy_takes_memory_from_v1(machine):
    unified = V2_MOUNT.format(mounted="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    root = machine(
        "4:memory:/job\n0::/\n",
        [V1_MOUNT.format(mounted="/"), unified],
        v1("job", 2 * GIB, GIB) | {"unified/cgroup.procs": 1},
    )
    assert usable_memory(root)[:2] == (GIB, 2 * GIB)


def test_used_beyond_the_limit_is_zero_not_negative(machine):
    root = machine("0::/a\n", [V2_MOUNT.format(mounted="/")], v2("a", GIB, 2 * GIB))
    assert usable_memory(root).available == 0


def test_a_full_host_binds_before_a_roomy_cgroup(machine):
    root = machine("0::/a\n", [V2_MOUNT.format(mounted="/")], v2("a", 60 * GIB, GIB))
    assert usable_memory(root).source.startswith("host")


def test_a_system_without_proc_falls_back_to_physical_memory(tmp_path):
    found = usable_memory(tmp_path)
    assert found.available == found.limit > 0
    assert "physical memory" in found.source


def test_this_machine():
    found = usable_memory()
    assert 0 <= found.available <= found.limit  # a machine may be full
    assert found.limit > 0
    assert bounds()[0].source.startswith("host")


@pytest.mark.parametrize("module", ["cgroups", "cpus", "memory"])
def test_needs_the_standard_library_only(module):
    tree = ast.parse(Path(host.__file__).with_name(f"{module}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others <= {f"{host.__name__}.cgroups"}
