"""The ranks of a model. Each rank is a process, and torch.distributed joins the processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from dlinfer.framework.mindie_ext.errors import RankError, RankLostError
from dlinfer.vendor import discovery

TIMEOUT = 600.0
"""A rank waits this many seconds for the others to join, and for each answer of a rank that runs.

The end of another rank is noticed at once.
"""


class Group:
    """The ranks, as this process sees them. own: ``join`` initialised torch.distributed, so ``leave`` must end it."""

    def __init__(self, rank: int, world_size: int, own: bool) -> None:
        self.rank, self.world_size, self._own = rank, world_size, own

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """If a collective inside the ``with`` block fails because another rank ended, raise RankLostError.

        what: the work inside the block, for the error's text, such as "a forward ran".
        """
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, RankLostError) or not _is_lost(error):
                raise
            raise RankLostError(
                rank=self.rank, world_size=self.world_size, what=what, detail=str(error).split("\n", 1)[0]
            ) from error

    def broadcast(self, values: np.ndarray) -> np.ndarray:
        """Return the values of rank 0, [n] int64, on each rank. The values of other ranks are dropped."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        with self.watched("tokens were shared"):
            dist.broadcast(tensor, 0)
        return tensor.numpy()

    def leave(self) -> None:
        """Leave the group. A second call does nothing."""
        if self._own and dist.is_initialized():
            dist.destroy_process_group()


def join(rank: int, world_size: int, device_type: str, timeout: float = TIMEOUT) -> Group:
    """Join the ranks at MASTER_ADDR and MASTER_PORT, the variables that torchrun sets, and wait until all have joined.

    If this process has already initialised torch.distributed, with the same rank and size, the existing group is used.
    Raises RankError. Raises RankLostError if the other ranks do not join within ``timeout`` seconds.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            there = f"torch.distributed already runs as rank {dist.get_rank()} of {dist.get_world_size()}"
            raise RankError(
                rank=rank,
                world_size=world_size,
                detail=there,
                advice="use the same rank and world_size for both",
            )
        return Group(rank, world_size, own=False)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        advice = (
            "start the ranks with torchrun, or set both variables to the address and a free port of rank 0"
        )
        raise RankError(rank=rank, world_size=world_size, detail=f"{missing[0]} is not set", advice=advice)
    port = os.environ["MASTER_PORT"]
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise RankError(
            rank=rank,
            world_size=world_size,
            detail=f"MASTER_PORT={port!r} is not a port",
            advice="set it to a number from 1 to 65535",
        )
    backend = discovery.device(device_type).communicator
    waited = timedelta(seconds=timeout)
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=waited)
        dist.barrier()
    except (dist.DistError, RuntimeError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        detail = str(error).split("\n", 1)[0]
        raise RankLostError(
            rank=rank, world_size=world_size, what="the ranks joined", detail=detail
        ) from error
    return Group(rank, world_size, own=True)


def _is_lost(error: BaseException) -> bool:
    """Return whether an error of torch.distributed means that another rank ended."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return any(
        sign in text for sign in ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out")
    )
