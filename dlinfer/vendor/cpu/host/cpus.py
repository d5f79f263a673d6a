"""The number of CPUs that this process may use, by its affinity, physical cores and cgroup quotas."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from dlinfer.vendor.cpu.host.cgroups import hierarchies


@dataclass(frozen=True)
class UsableCpus:
    """The CPUs of this process.

    logical: numbers of the logical CPUs that the process's affinity allows.
    cores, nodes: how many physical cores and NUMA nodes these CPUs belong to.
    machine: how many logical CPUs the machine has.
    quota: how many CPUs a cgroup grants, such as 1.5; None without a limit."""

    logical: frozenset[int]
    cores: int
    nodes: int
    machine: int
    quota: float | None = None

    @property
    def threads(self) -> int:
        """The number of threads that can run at once: one for each physical core, and no more than the quota."""
        return self.cores if self.quota is None else max(1, min(self.cores, ceil(self.quota)))

    def physical(self, root: Path = Path("/")) -> dict[tuple[int, ...], int]:
        """Return a mapping from each core to its NUMA node. A core is the tuple of its logical CPUs that are allowed.

        root: the folder with ``proc`` and ``sys``, for tests."""
        nodes = {
            number: int(folder.name.removeprefix("node"))
            for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
            for number in _numbers(_text(folder / "cpulist"))
        }
        cores = {_siblings(number, root) & self.logical for number in self.logical}
        return {tuple(sorted(core)): nodes.get(min(core), 0) for core in sorted(cores, key=min)}

    def __str__(self) -> str:
        parts = [_counted(self.cores, "core")]
        if len(self.logical) < self.machine:
            parts.append(f"{len(self.logical)} of {self.machine} logical CPUs")
        if self.quota is not None:
            parts.append(f"quota {self.quota:g} CPUs")
        parts.append(_counted(self.nodes, "NUMA node"))
        return f"{', '.join(parts)}: {_counted(self.threads, 'thread')}"


def usable_cpus(root: Path = Path("/")) -> UsableCpus:
    """Read the CPUs that this process may use now. root: the folder with ``proc`` and ``sys``, for tests."""
    if hasattr(os, "sched_getaffinity"):
        logical = frozenset(os.sched_getaffinity(0))
    else:  # not Linux
        logical = frozenset(range(os.cpu_count() or 1))
    cores = {_siblings(number, root) for number in logical}
    nodes = sum(
        not logical.isdisjoint(_numbers(_text(folder / "cpulist")))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    )
    machine = len(_numbers(_text(root / "sys/devices/system/cpu/online"))) or os.cpu_count() or len(logical)
    return UsableCpus(logical, len(cores), max(1, nodes), machine, min(_quotas(root), default=None))


def _siblings(number: int, root: Path) -> frozenset[int]:
    """Return the logical CPUs of the core that the logical CPU ``number`` belongs to."""
    text = _text(root / f"sys/devices/system/cpu/cpu{number}/topology/core_cpus_list")
    return frozenset(_numbers(text) or {number})


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota, in CPUs, of each cgroup that limits this process."""
    for version, folders in hierarchies("cpu", root):
        for folder in folders:
            if version == "v2":
                quota, _, period = _text(folder / "cpu.max").partition(" ")
            else:
                quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit():  # "max" and -1 mean no limit
                yield int(quota) / int(period)


def _numbers(ranges: str) -> set[int]:
    """Parse a list such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
