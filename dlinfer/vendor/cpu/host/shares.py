"""Divide this host's CPUs, memory nodes and free memory among the processes (ranks) of one model.

Without a share each rank would start a thread for every core, and count all free memory as its own.
"""

import ctypes
import logging
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from dlinfer.vendor.cpu.host.cpus import usable_cpus
from dlinfer.vendor.cpu.host.memory import UsableMemory, usable_memory

logger = logging.getLogger("dlinfer")

_T = TypeVar("_T")

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1  # MPOL_PREFERRED: memory of this node first, of others when it is full


@dataclass(frozen=True)
class Share:
    """The part of the host that one rank uses.

    cpus: logical CPUs.
    threads: how many threads can run at once.
    node: the NUMA node of all these CPUs; None if they belong to several, or if the machine has one only.
    """

    cpus: frozenset[int]
    threads: int
    node: int | None


def share_of(index: int, count: int, root: Path = Path("/")) -> Share:
    """Return the share of rank ``index`` of ``count`` ranks on this host.

    If there are at least as many NUMA nodes as ranks, a share is one or more whole nodes. Otherwise a share is a part
    of the cores of one node or, if the ranks do not divide evenly among the nodes, of all cores. If there are fewer
    cores than ranks, all ranks share all CPUs.
    root: the folder with ``proc`` and ``sys``, for tests."""
    usable = usable_cpus(root)
    by_node: dict[int, list[tuple[int, ...]]] = {}
    for core, node in usable.physical(root).items():
        by_node.setdefault(node, []).append(core)
    nodes = sorted(by_node)
    per_node = count // len(nodes)
    if usable.cores < count:
        return Share(usable.logical, 1, None)
    if len(nodes) >= count:
        own = [core for node in _part(nodes, index, count) for core in by_node[node]]
    elif count % len(nodes) == 0 and all(len(cores) >= per_node for cores in by_node.values()):
        own = _part(sorted(by_node[nodes[index // per_node]]), index % per_node, per_node)
    else:
        own = _part([core for node in nodes for core in sorted(by_node[node])], index, count)
    quota = len(own) if usable.quota is None else int(usable.quota / count)
    home = {node for node in nodes for core in by_node[node] if core in own}
    only = home.pop() if len(home) == 1 and len(nodes) > 1 else None
    return Share(frozenset(cpu for core in own for cpu in core), max(1, min(len(own), quota)), only)


def has_room_for(count: int) -> bool:
    """Return whether ``count`` ranks can run at once.

    If so, a rank may spin, not sleep, while it waits for the others.
    """
    usable = usable_cpus()
    return usable.cores >= count and (usable.quota is None or usable.quota >= count)


def _part(items: list[_T], index: int, count: int) -> list[_T]:
    return items[index * len(items) // count : (index + 1) * len(items) // count]


def take(share: Share) -> None:
    """Limit this process to a share: the CPUs of all its threads, the number of torch's threads, its memory's node.

    If the user has set ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS``, torch's number of threads is kept. If this number
    exceeds the share's CPUs, neither CPUs nor memory are limited."""
    if not any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        torch.set_num_threads(share.threads)
    if torch.get_num_threads() > len(share.cpus) or not sys.platform.startswith("linux"):
        return
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), share.cpus)
    if share.node is not None:
        _prefer_memory_of(share.node)


def _prefer_memory_of(node: int) -> None:
    """Let this thread, and threads that it starts, take memory of one NUMA node first, of others if it is full."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _PREFERRED, mask, len(mask) * bits + 1):  # the kernel reads one bit less
        reason = os.strerror(ctypes.get_errno())
        logger.debug("memory comes from any NUMA node, because set_mempolicy failed: %s", reason)


class MemoryShare:
    """The part of the free memory that one rank may use, fixed before any rank allocates.

    Once other ranks have allocated, an equal part of the memory that is still free would be too little.
    """

    def __init__(self, count: int) -> None:
        whole = usable_memory()
        self._count, self._budget, self._before = count, whole.available // count, _own_memory()

    def usable(self) -> UsableMemory:
        """Return how much of its part this process may still allocate. ``limit`` is its part of the whole limit."""
        whole = usable_memory()
        left = self._budget - (_own_memory() - self._before)
        available = max(0, min(whole.available, left))
        return UsableMemory(available, whole.limit // self._count, f"{whole.source}, for {self._count} ranks")


def _own_memory() -> int:
    """Return the size in bytes of this process's memory that no file backs; 0 where the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0
