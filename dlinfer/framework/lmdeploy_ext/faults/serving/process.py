"""Start and end the engine's process of ``lmdeploy serve api_server``, and report failures of this process.

LMDeploy 0.18 publishes the engine's port through a ``multiprocessing.Manager``, which runs in a third process. That has
three faults:

- The parent shuts the manager down as soon as it sees the port. The start fails if the engine's process still waits for
  the manager's answer.
- If the parent is killed during the start (SIGTERM, SIGKILL), manager and engine run forever.
- If the parent is interrupted during the start (SIGINT), it waits for the engine forever.

Here the engine's process sends the port through a pipe. A closed pipe tells the parent that the engine's process has
ended. A thread of the engine's process waits for the parent's end.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from dlinfer.errors import DlinferError, EngineStartError
from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.errors import ending, in_short
from dlinfer.framework.lmdeploy_ext.ranks.endings import RANKS
from dlinfer.framework.patching import Original

_SHUTDOWN_SECONDS = 10
"""How long an engine may take to end before it is killed. LMDeploy has the same limit."""

# --- in the engine's process


def run_engine_process(report: Connection, **kwargs: Any) -> None:
    """Run ``ZMQMPEngine._mp_proc(**kwargs)`` in the engine's process, and report to the parent through a pipe.

    report: the pipe's sending end. Sends ``("port", number)`` once the RPC socket is bound. If an exception ends the
    process, sends ``("failed", error)`` and raises the exception again. ``error`` is the exception itself if it is one
    of ours, else its text.
    """
    from lmdeploy.pytorch.engine.mp_engine.zmq_engine import ZMQMPEngine

    threading.Thread(target=_end_with_parent, name="end_with_parent", daemon=True).start()
    try:
        publisher: Any = _PortPublisher(report)
        ZMQMPEngine._mp_proc(publisher, publisher, **kwargs)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the parent stops listening once the engine serves
            report.send(("failed", error if isinstance(error, DlinferError) else in_short(error)))
        raise


class _PortPublisher(contextlib.nullcontext[None]):
    """Replaces the shared dict and the condition that ``_mp_proc`` takes. Setting a port sends it through the pipe."""

    def __init__(self, report: Connection) -> None:
        super().__init__()
        self._report = report

    def __setitem__(self, key: str, value: int) -> None:
        if key == "rpc_server_port":
            self._report.send(("port", value))

    def notify(self) -> None:
        """Do nothing, because the reader of a pipe needs no notification."""


def _end_with_parent() -> None:
    """Wait until the parent process has ended. Then end this process by SIGTERM, or by force if that takes too long."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SHUTDOWN_SECONDS)
    os._exit(1)


# --- in the parent


@corrects(
    "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine._start_mp_proc",
    why="shuts the Manager down while the child still talks to it, so some starts fail with EOFError, and leaves "
    "Manager and engine running if the parent is killed during the start",
    essential=False,
)
def _start_mp_proc(
    original: Original,
    self: Any,
    model_path: str,
    engine_config: Any = None,
    speculative_config: Any = None,
    **kwargs: Any,
) -> None:
    from lmdeploy.pytorch.engine.mp_engine.zmq_engine import logger

    setattr(self, RANKS, 1 if engine_config is None else engine_config.tp)
    self.mp_ctx = multiprocessing.get_context("spawn")
    self.start_report, report = self.mp_ctx.Pipe(duplex=False)
    with report:
        kwargs |= {"model_path": model_path, "engine_config": engine_config, "log_level": logger.level}
        kwargs["speculative_config"] = speculative_config
        self.proc = self.mp_ctx.Process(
            target=run_engine_process, args=(report,), kwargs=kwargs, name="mp_engine_proc"
        )
        self.proc.start()
    # With the parent's copy of the child's end closed, the child's death ends the wait.
    kind, value = _receive(self)
    if kind != "port":
        raise _start_error(value)
    self.port = value


def _receive(engine: Any) -> tuple[str, Any]:
    """Return the next message of the engine's process, or ``("failed", reason)`` if it has ended without a message.

    engine: the ZMQMPEngine in the parent. reason: a text that says how the process ended.
    """
    try:
        return engine.start_report.recv()
    except (EOFError, OSError):  # OSError if it died in the middle of a message
        engine.proc.join(_SHUTDOWN_SECONDS)
        return "failed", ending(engine.proc.exitcode)


def _start_error(reason: DlinferError | str) -> DlinferError:
    own = isinstance(reason, DlinferError)
    return reason if own else EngineStartError(framework="LMDeploy", detail=reason)


@corrects(
    "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine.__init__",
    why="leaves the engine's process running after an exception or Ctrl-C during the start, so Python waits for it "
    "forever at exit, and does not pass on why a start failed",
    essential=False,
)
def _init(
    original: Original,
    self: Any,
    model_path: str,
    engine_config: Any = None,
    speculative_config: Any = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> None:
    from lmdeploy.pytorch.engine.mp_engine.zmq_rpc import RPCServerDeadError

    try:
        original(self, model_path, engine_config, speculative_config, trust_remote_code, **kwargs)
    except RPCServerDeadError:
        _, reason = _receive(self)  # its last message is still in the pipe
        _abandon(self)
        raise _start_error(reason) from None
    except BaseException:
        _abandon(self)
        raise
    self.start_report.close()


def _abandon(engine: Any) -> None:
    """End the RPC client and the process of an engine whose start failed.

    Such an engine has not yet registered its ``close`` with ``atexit``.
    """
    if hasattr(engine, "rpc_client"):
        engine.rpc_client.stop()
    # Without an id, Ctrl-C cut the start short: the process gets incomplete instructions, and ends.
    if engine.proc is not None and engine.proc.pid is not None:
        engine.proc.terminate()
        engine.proc.join(_SHUTDOWN_SECONDS)
        if engine.proc.is_alive():
            engine.proc.kill()
            engine.proc.join()
