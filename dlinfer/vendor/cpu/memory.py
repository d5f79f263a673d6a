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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class UsableMemory(NamedTuple):
    """One bound on this process's memory, in bytes.

    available: what may still be allocated under it, never negative. limit: the bound itself.
    source: where the numbers come from, for people.
    """

    available: int
    limit: int
    source: str


@dataclass(frozen=True)
class _Version:
    """Names that differ between the two cgroup interfaces."""

    label: str
    filesystem: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


# v2: a process over memory.high is not killed, but slowed down until it is of no use; so that is a bound too.
_V2 = _Version("cgroup v2", "cgroup2", ("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Version(
    "cgroup v1", "cgroup", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
)


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
    for version, mount, folder in _memberships(root):
        for level in (folder, *folder.parents):  # a limit of any ancestor binds as well
            yield from _limits(version, level, root)
            if level == mount:
                break


def _memberships(root: Path) -> Iterator[tuple[_Version, Path, Path]]:
    """(version, mount point, this process's folder in it) of each hierarchy that may account for memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = list(_mounts(root))
    except OSError:  # not Linux, or no /proc
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version = _V2
        elif "memory" in controllers.split(","):
            version = _V1
        else:
            continue
        for filesystem, options, mounted, point in mounts:
            if filesystem != version.filesystem or (version is _V1 and "memory" not in options):
                continue
            # A container may see the host's path in /proc/self/cgroup while only a part of the hierarchy,
            # rooted at `mounted`, is mounted. For a path outside it the mount point is the nearest folder.
            inside = os.path.relpath(path, mounted)
            known = not inside.startswith("..") and not path.startswith("/..")
            folder = point / inside if known else point
            yield version, point, folder if folder.is_dir() else point


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, Path]]:
    """(filesystem, super options, root of the mounted part, mount point) of every mount."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        yield after[0], after[-1].split(","), before[3], root / before[4].lstrip("/")


def _limits(version: _Version, folder: Path, root: Path) -> Iterator[UsableMemory]:
    for name in version.limits:
        try:
            limit = int((folder / name).read_text())
            usage = int((folder / version.usage).read_text())
            reclaimable = _table(folder / "memory.stat").get(version.reclaimable, 0)
        except (OSError, ValueError):  # no memory controller in this folder, or "max": no limit
            continue
        available = max(0, limit - max(0, usage - reclaimable))
        yield UsableMemory(available, limit, f"{version.label}, /{(folder / name).relative_to(root)}")


def _table(path: Path) -> dict[str, int]:
    """A kernel file with a name and a number in each line."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
