"""Sums over ranks: through shared memory (csrc/ranks) if all ranks run on one host, else by torch.distributed.

The memory is an anonymous file (``memfd_create``) of rank 0, which the other ranks open through ``/proc``. The file has
no name in ``/dev/shm``, so nothing is left behind if all ranks are killed.
"""

import logging
import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, distributed

from dlinfer.ops.collective.all_reduce import by_torch
from dlinfer.ops.collective.groups import process_group
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.compiled import compiled
from dlinfer.vendor.device import host_identity

logger = logging.getLogger("dlinfer")

_AWAKE = 200  # microseconds that a rank spins before it sleeps, if it has a CPU of its own
_sharing: set[int] = set()


def all_reduce(x: Tensor, group: int) -> None:
    kernel = compiled("all_reduce", x) if group in _sharing else None
    if kernel is not None:
        kernel(x, group)
    else:
        by_torch(x, group)


def shares_memory(group: int) -> bool:
    """Return whether the ranks of a group sum through shared memory."""
    return group in _sharing


def share_memory(group: int, spins: bool = False) -> bool:
    """Set up shared memory for the ranks of a group, and return whether they can use it. All ranks must call this.

    group: a group number of ``dlinfer.ops.collective.groups``.
    spins: whether a rank may wait without sleeping, because it has a CPU of its own.
    """
    of_torch = process_group(group)
    rank, count = distributed.get_rank(of_torch), distributed.get_world_size(of_torch)
    missing = native.why_not() or (
        "" if hasattr(os, "memfd_create") else "this system has no anonymous files"
    )
    file = -1
    try:
        if rank == 0 and not missing:
            file = os.memfd_create("dlinfer_ranks")
            os.ftruncate(file, torch.ops.dlinfer_cpu.shared_bytes.default(count))
        ranks = _gathered((host_identity(), os.getpid(), file, _inode(file), missing), of_torch)
        hosts, processes, files, inodes, reasons = zip(*ranks, strict=True)
        reason = next(filter(None, reasons), "") or (
            "the ranks run on several hosts" if len(set(hosts)) > 1 else ""
        )
        if not reason and rank > 0:
            with suppress(OSError):  # other containers' processes are not visible
                file = os.open(f"/proc/{processes[0]}/fd/{files[0]}", os.O_RDWR | os.O_CLOEXEC)
            reason = "" if _inode(file) == inodes[0] else "ranks do not see each other's files"
        reason = next(
            filter(None, _gathered(reason, of_torch)), ""
        )  # also a barrier: every rank has opened the file
        if reason:
            logger.info("ranks exchange sums by torch.distributed, not by shared memory: %s", reason)
            return False
        torch.ops.dlinfer_cpu.open_group.default(group, file, rank, list(processes), _AWAKE if spins else 0)
    finally:
        if file >= 0:
            os.close(file)
    _sharing.add(group)
    return True


def free_memory(group: int) -> None:
    """Free the shared memory of a group, if it has some."""
    if group in _sharing:
        _sharing.remove(group)
        torch.ops.dlinfer_cpu.close_group.default(group)


def _gathered(value: Any, group: Any) -> list[Any]:
    """Return the ``value`` of every rank, in the order of ranks."""
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)  # pyright: ignore[reportUnknownMemberType]
    return values


def _inode(file: int) -> tuple[int, int] | None:
    if file < 0:
        return None
    status = os.fstat(file)
    return status.st_dev, status.st_ino
