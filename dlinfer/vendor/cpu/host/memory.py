"""How much memory this process may still use: the host's free memory, or a cgroup's room if that is less.

In a container the host's numbers are a trap: a process that trusts them is killed when its cgroup is full.
Standard library only.

Contracts: cgroup v1 (kernel Documentation/admin-guide/cgroup-v1/memory.rst), cgroup v2
(Documentation/admin-guide/cgroup-v2.rst), MemAvailable (Documentation/filesystems/proc.rst). As the kubelet
does for its working set, page cache that nobody used lately (inactive_file) counts as free: the kernel drops
it before it kills.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dlinfer.vendor.cpu.host.cgroups import hierarchies


class UsableMemory(NamedTuple):
    """One bound on this process's memory, in bytes.

    available: what may still be allocated under it, never negative. limit: the bound itself.
    source: where the numbers come from, for people.
    """

    available: int
    limit: int
    source: str


class _Names(NamedTuple):
    """Names that differ between the two cgroup interfaces."""

    label: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_NAMES = {
    # A process over memory.high is not killed, but slowed down until it is of no use; so that is a bound too.
    "v2": _Names("cgroup v2", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "v1": _Names("cgroup v1", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def usable_memory(root: Path = Path("/")) -> UsableMemory:
    """The tightest bound on what this process may allocate now: ``bounds()`` with the least available.

    root: where ``proc`` and ``sys`` are found, for tests. Reads files only; takes under a millisecond.
    """
    return min(bounds(root), key=lambda bound: bound.available)


def bounds(root: Path = Path("/")) -> list[UsableMemory]:
    """Every bound in force: the host's first, then those of this process's cgroup and its ancestors.

    A cgroup limit that is not below the host's memory is none. Resource limits (``ulimit -v``) are not read.
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
        return UsableMemory(total, total, "host, physical memory (what is free is unknown on this system)")


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
    """A kernel file with a name and a number in each line."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
