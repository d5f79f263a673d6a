"""Divides this machine among replicas. A replica gets CPUs of one NUMA node, memory of that node, and threads.

This module imports only the standard library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from typing import Any

from dlinfer.serve.errors import ReplicaCountError


@dataclass(frozen=True)
class Placement:
    """The share of the machine that one replica gets.

    cpus: the logical CPUs that the replica may run on. threads: the number of threads of its kernels.
    node: the NUMA node to allocate memory on first. None means any node.
    """

    cpus: tuple[int, ...]
    threads: int
    node: int | None = None

    def __str__(self) -> str:
        where = "" if self.node is None else f", NUMA node {self.node}"
        return f"{self.threads} thread{'s' * (self.threads > 1)} on CPUs {_ranges(self.cpus)}{where}"

    def encode(self) -> str:
        """Return the placement as one word of a command line."""
        return f"{','.join(map(str, self.cpus))}/{self.threads}/{'' if self.node is None else self.node}"

    @classmethod
    def decode(cls, text: str) -> "Placement":
        """Return the placement that ``encode`` has turned into ``text``."""
        cpus, threads, node = text.split("/")
        return cls(tuple(map(int, cpus.split(","))), int(threads), int(node) if node else None)


def place(cores: Mapping[tuple[int, ...], int], quota: float | None, replicas: int | None) -> list[Placement]:
    """Return the placement of each replica.

    cores: maps a core, written as the tuple of its logical CPUs, to its NUMA node. Only usable cores are in it.
    quota: how many CPUs all replicas together may keep busy. None means no limit.
    replicas: the number of replicas. None means one for each node.

    Replicas are spread over the nodes. The replicas of a node share its cores evenly. With fewer replicas than nodes, a
    replica gets several nodes. Raises ReplicaCountError if there are more replicas than cores.
    """
    nodes: dict[int, list[tuple[int, ...]]] = {}
    for core, node in cores.items():
        nodes.setdefault(node, []).append(core)
    names = sorted(nodes)
    count = replicas or len(names)
    if count > len(cores):
        raise ReplicaCountError(count=count, cores=len(cores))
    threads = len(cores) if quota is None else max(1, floor(quota / count))
    shares: list[tuple[int | None, list[tuple[int, ...]]]] = []
    if count < len(names):  # a replica gets several nodes
        for part in _parts(names, count):
            node = part[0] if len(part) == 1 else None
            shares.append((node, [core for name in part for core in nodes[name]]))
    else:
        numbers = [len(part) for part in _parts(range(count), len(names))]
        for node, number in zip(names, numbers, strict=True):
            shares += [(node, part) for part in _parts(nodes[node], number)]
    return [
        Placement(
            cpus=tuple(sorted(cpu for core in share for cpu in core)),
            threads=min(len(share), threads),
            node=node if len(names) > 1 else None,
        )
        for node, share in shares
    ]


def _parts(items: Sequence[Any], count: int) -> list[list[Any]]:
    """Split items into ``count`` parts of consecutive items. Lengths differ by at most one; longer parts come first."""
    size, longer = divmod(len(items), count)
    ends = [size * at + min(at, longer) for at in range(count + 1)]
    return [list(items[begin:end]) for begin, end in pairwise(ends)]


def _ranges(cpus: Sequence[int]) -> str:
    """Return ascending numbers as text: ``0-3,8`` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
