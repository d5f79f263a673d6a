"""The memory that this process may still use: the host's free memory, or a cgroup's room if that is less.

In a container the kernel kills a process when its cgroup is full, however much memory the host has. Standard library
only.

The files are documented in the kernel's Documentation: admin-guide/cgroup-v1/memory.rst, admin-guide/cgroup-v2.rst and
filesystems/proc.rst (MemAvailable). Inactive page cache (inactive_file) counts as free, as in the kubelet's working
set: the kernel drops this cache before it kills a process.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dlinfer.vendor.cpu.host.cgroups import hierarchies


class UsableMemory(NamedTuple):
    """One bound on this process's memory, in bytes.

    available: the bytes still free under the bound, never negative.
    limit: the bound itself.
    source: where the numbers come from, for messages.
    """

    available: int
    limit: int
    source: str


class _Names(NamedTuple):
    label: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_NAMES = {
    # memory.high is a bound too: the kernel slows a process above it until it is useless, though it does not kill it.
    "v2": _Names("cgroup v2", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "v1": _Names("cgroup v1", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def usable_memory(root: Path = Path("/")) -> UsableMemory:
    """Return the tightest bound: of all ``bounds()``, the one with the least available memory now.

    root: the folder with ``proc`` and ``sys``, for tests. Reads files only; takes under a millisecond.
    """
    return min(bounds(root), key=lambda bound: bound.available)


def bounds(root: Path = Path("/")) -> list[UsableMemory]:
    """Return every bound in force: the host's first, then those of this process's cgroup and its ancestors.

    Cgroup limits that are not below the host's memory are left out. Resource limits (``ulimit -v``) are not read.
    """
    host = _host(root)
    return [host, *(bound for bound in _cgroups(root) if bound.limit < host.limit)]


def _host(root: Path) -> UsableMemory:
    try:
        numbers = _table(root / "proc/meminfo")  # in kB, which means KiB here
        return UsableMemory(
            numbers["MemAvailable"] * 1024, numbers["MemTotal"] * 1024, "host, MemAvailable of /proc/meminfo"
        )
    except (OSError, KeyError):  # not Linux: only the total is to be had without third-party code
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return UsableMemory(total, total, "host, physical memory (free memory is unknown on this system)")


def _cgroups(root: Path) -> Iterator[UsableMemory]:
    for version, folders in hierarchies("memory", root):
        for folder in folders:
            yield from _limits(_NAMES[version], folder, root)


def _limits(names: _Names, folder: Path, root: Path) -> Iterator[UsableMemory]:
    for name in names.limits:
        try:
            limit = int((folder / name).read_text())
            usage = int((folder / names.usage).read_text())
            reclaimable = _table(folder / "memory.stat").get(names.reclaimable, 0)
        except (OSError, ValueError):  # no memory controller in this folder, or "max": no limit
            continue
        available = max(0, limit - max(0, usage - reclaimable))
        yield UsableMemory(available, limit, f"{names.label}, /{(folder / name).relative_to(root)}")


def _table(path: Path) -> dict[str, int]:
    """Parse a kernel file that has a name and a number in each line."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
