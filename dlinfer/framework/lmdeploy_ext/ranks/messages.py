"""Notifies ranks of messages by semaphores alone, because a killed process does not leave a semaphore locked.

LMDeploy's MPExecutor and its ranks wait for each other by conditions and a barrier. If a process is killed while it
waits for an event, the next process that sets the event waits forever for the dead process to wake up.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation, ranks
from dlinfer.framework.patching import Original, replaces

_WHY = "synchronises by conditions and a barrier, which a killed process leaves locked forever"
_LOOK = 0.2
"""Seconds between two checks whether waiting still makes sense."""
_NOTIFIER = "lmdeploy.pytorch.engine.executor.mp_executor:Notifier"

_patched = {"when": activation.is_on, "for_feature": ranks.FEATURE}


@replaces(f"{_NOTIFIER}.__init__", why=_WHY, **_patched)
def _init(original: Original, self: Any, num_receiver: int, mp_ctx: Any) -> None:
    """Create the semaphores and set the other attributes of a Notifier.

    sent: one semaphore for each receiver. It counts the messages that the receiver has not read.
    free: one semaphore for each receiver. It counts the messages that may be sent before the receiver has to read one.
    receiver: the index of this process among the receivers.
    is_closed: whether waiting is to end, because ``close`` was called.
    check: a function that raises an error if waiting has become useless, or None.
    """
    from lmdeploy.pytorch.engine.executor.mp_executor import NUM_SHARED_BLOCK

    # A message is written into its block before it is counted as sent, so one more block is in use.
    self.sent = [mp_ctx.Semaphore(0) for _ in range(num_receiver)]
    self.free = [mp_ctx.Semaphore(NUM_SHARED_BLOCK - 1) for _ in range(num_receiver)]
    self.receiver, self.is_closed, self.check = 0, False, None


def _acquire(notifier: Any, semaphore: Any) -> None:
    while not semaphore.acquire(timeout=_LOOK):
        if notifier.is_closed:
            raise asyncio.CancelledError
        if notifier.check is not None:
            notifier.check()


@replaces(f"{_NOTIFIER}.set", why=_WHY, **_patched)
def _set(original: Original, self: Any) -> None:
    for free in self.free:
        _acquire(self, free)
    for sent in self.sent:
        sent.release()


@replaces(f"{_NOTIFIER}.set_async", why=_WHY, **_patched)
async def _set_async(original: Original, self: Any) -> None:
    for free in self.free:
        if not free.acquire(block=False):
            await asyncio.get_running_loop().run_in_executor(None, _acquire, self, free)
    for sent in self.sent:
        sent.release()


@replaces(f"{_NOTIFIER}.wait", why=_WHY, **_patched)
@contextmanager
def _wait(original: Original, self: Any) -> Iterator[None]:
    _acquire(self, self.sent[self.receiver])
    yield
    self.free[self.receiver].release()


@replaces(
    f"{_NOTIFIER}.wait_async",
    why=f"{_WHY}, and at every 32nd message waits for the other ranks in the event loop. A rank that computes by then "
    "waits for this rank's part of a sum, so both wait forever",
    **_patched,
)
@asynccontextmanager
async def _wait_async(original: Original, self: Any) -> AsyncIterator[None]:
    await asyncio.get_running_loop().run_in_executor(None, _acquire, self, self.sent[self.receiver])
    yield
    self.free[self.receiver].release()


@replaces(f"{_NOTIFIER}.close", why=_WHY, **_patched)
def _close(original: Original, self: Any) -> None:
    self.is_closed = True
