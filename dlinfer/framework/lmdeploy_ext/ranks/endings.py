"""Ends all processes of a model if one of them ends. The error names the ended process and the reason.

LMDeploy's executor does not watch its ranks. If a rank fails, or is killed because memory runs out, the other ranks
wait forever for its part of a sum, and the engine waits forever for its answer. If the engine is killed, all ranks keep
running.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation, ranks
from dlinfer.framework.lmdeploy_ext.errors import RankEndedError, ending
from dlinfer.framework.patching import Original, replaces

logger = logging.getLogger("dlinfer")

_NAME = "dlinfer_watch"
"""Attribute of an MPExecutor that holds its Watch."""
RANKS = "dlinfer_ranks"
"""Attribute of a server's ZMQMPEngine that holds the number of ranks."""
_SERVERS_ENGINE = "mp_engine_proc"
"""Name of the process that runs a server's engine. ``faults.serving.process`` sets this name."""
_SECONDS = 3
"""How long a rank may take to end before it is killed, and how long a server may take to answer its last requests."""
_EXECUTOR = "lmdeploy.pytorch.engine.executor.mp_executor"
_WAITS = "waits forever once a rank's process has ended"

# --- in the engine's process


class Watch:
    """A thread that waits until one rank of an executor ends, and then kills the other ranks.

    error: the RankEndedError once a rank has ended before ``close`` was called; else None.
    """

    def __init__(self, executor: Any) -> None:
        self.error: RankEndedError | None = None
        self._executor, self._closed = executor, False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        threading.Thread(target=self._run, name="dlinfer_watch", daemon=True).start()

    def close(self) -> None:
        """Make the thread ignore ranks that end from now on."""
        self._closed = True

    def check(self) -> None:
        """Raise the error if a rank has ended."""
        if self.error is not None:
            raise self.error.again()

    async def wait(self) -> None:
        """Wait until a rank has ended."""
        ended = asyncio.Event()
        self._waiting.append((asyncio.get_running_loop(), ended))
        while self.error is None:
            await ended.wait()

    def _run(self) -> None:
        processes = [rank._proc for rank in self._executor.procs]
        ended = connection.wait([process.sentinel for process in processes])
        if self._closed:
            return
        number = next(i for i, process in enumerate(processes) if process.sentinel in ended)
        processes[number].join(_SECONDS)
        how = ending(processes[number].exitcode)
        self.error = RankEndedError(rank=number, ranks=len(processes), how=how)
        logger.error("%s", self.error)
        for process in processes:
            process.kill()
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)


@replaces(
    f"{_EXECUTOR}:MPExecutor.__init__",
    why="never checks that its ranks still run, and handles their signal in a way that may wait forever for itself",
    when=activation.is_on,
    signature="(self, model_path, model_config, cache_config, backend_config, dist_config, misc_config, "
    "adapters=None, specdecode_config=None, device_type='cuda', trust_remote_code=False)",
    for_feature=ranks.FEATURE,
)
def _init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    watch = Watch(self)
    setattr(self, _NAME, watch)
    for notifier in (self.comm_notifier, *(buffer.notifier for buffer in self.ret_bufs)):
        notifier.check = watch.check  # the module ``messages`` calls it


@replaces(f"{_EXECUTOR}:MPExecutor.wait_tasks", why=_WAITS, when=activation.is_on, for_feature=ranks.FEATURE)
async def _wait_tasks(original: Original, self: Any) -> None:
    watch: Watch = getattr(self, _NAME)
    tasks = [asyncio.ensure_future(original(self)), asyncio.ensure_future(watch.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if watch.error is not None and multiprocessing.current_process().name == _SERVERS_ENGINE:
        _end_soon()  # after the engine has answered its requests
    watch.check()
    await tasks[0]


@replaces(
    f"{_EXECUTOR}:MPExecutor.release",
    why="ends the ranks' processes without telling dlinfer's watch, which would report an error",
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _release(original: Original, self: Any) -> None:
    getattr(self, _NAME).close()
    original(self)


@replaces(
    f"{_EXECUTOR}:ExecutorProc.join",
    why="waits forever for a rank that does not end when asked to",
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _join(original: Original, self: Any) -> None:
    if self._proc is None:
        return
    self._proc.join(_SECONDS)
    if self._proc.is_alive():
        self._proc.kill()
        original(self)


@replaces(
    "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine._mark_backend_dead",
    why="lets a server without an engine answer 503 forever, though its end would let a supervisor restart it",
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _server_without_engine(original: Original, self: Any) -> None:
    original(self)
    if getattr(self, RANKS, 1) > 1:
        logger.error("the engine's process has ended, so the server ends too")
        _end_soon()


def _end_soon() -> None:
    threading.Timer(_SECONDS, os._exit, (1,)).start()


# --- in a rank's process


@replaces(
    f"{_EXECUTOR}:ExecutorProc._main_loop_impl",
    why="lets a failed rank wait for the other ranks at the end of its process group, while they wait for it",
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
async def _main_loop(
    original: Original, self: Any, proc_id: int, comm_buf: Any, ret_buf: Any, worker: Any
) -> None:
    threading.Thread(target=_end_with_engine, name="end_with_engine", daemon=True).start()
    comm_buf.notifier.receiver = proc_id  # the module ``messages`` reads it
    try:
        await original(self, proc_id, comm_buf, ret_buf, worker)
    except Exception as error:  # noqa: BLE001 - any error ends the model
        _end(error)


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.start",
    why="starts tasks whose failure nobody notices, so the other ranks wait forever for a rank whose step failed",
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _start(original: Original, self: Any, forward_event: Any = None) -> None:
    original(self, forward_event)
    if multiprocessing.current_process().name.startswith("ExecutorProc-"):
        for task in (self._background_task, self._preprocess_task):
            task.add_done_callback(_end_on_failure)


def _end_on_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _end(error)


def _end(error: BaseException) -> None:
    """Log an error and end this rank's process. The Watch in the engine's process then ends the other ranks."""
    logger.error("%s failed", multiprocessing.current_process().name, exc_info=error)
    os._exit(1)


def _end_with_engine() -> None:
    """Wait until the engine's process has ended, then end this rank's process at once.

    An orderly end is not possible, because the main thread may be waiting for another rank in C++.
    """
    engine = multiprocessing.parent_process()
    if engine is not None:
        engine.join()
        os._exit(1)
