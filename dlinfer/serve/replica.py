"""Runs one server: starts it, watches it, restarts it if it dies, and stops it after its last answer."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

import aiohttp

from dlinfer.serve import addresses, child
from dlinfer.serve.errors import ReplicaStartError
from dlinfer.serve.output import say
from dlinfer.serve.placement import Placement

logger = logging.getLogger("dlinfer")

_FAILED_STARTS = 3
"""The supervisor gives up if a replica ends this many times in a row before it answers, while no replica serves."""

_LONGEST_PAUSE = 30.0
_POLL_SECONDS = 0.5
_WATCH_SECONDS = 5.0
# A server whose /health gives no 200 for this time is killed. /health itself answers 503 only if the engine has made no
# progress for LMDEPLOY_HEALTH_UNHEALTHY_AFTER seconds. A server that is told to end refuses connections while it
# finishes its running requests. Meanwhile its last answer counts.
_STUCK_SECONDS = 180.0
_LOG_LINES = 30


class Replica:
    """A server on its own port.

    number: the replica's number, for logs. words: the server's command line. address: the host and port that it listens
    on. placement: the CPUs and memory that it gets; None binds nothing. changed: called whenever ``state`` changes.
    """

    def __init__(
        self,
        number: int,
        words: Sequence[str],
        address: tuple[str, int],
        placement: Placement | None,
        changed: Callable[[], None],
    ) -> None:
        self.number, self.placement = number, placement
        self.url = addresses.url(*address)
        self.state = "starting"  # or "ready", "draining", "stopped"
        self.restarts = 0
        self._words = words
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._ending = False
        self._restarting = False
        self._came_up = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether the replica accepts new requests."""
        return self.state == "ready"

    async def run(self, alone: Callable[[], bool]) -> None:
        """Keep the server running until ``stop`` is called.

        alone: returns whether no replica serves now. If this replica fails to start several times in a row while no
        replica serves, ReplicaStartError is raised.
        """
        failed = 0
        while not self._ending:
            begun = time.monotonic()
            process = await self._start()
            if await self._until_ready(process):
                failed = 0
                logger.info("replica %d is ready after %.1f s", self.number, time.monotonic() - begun)
                self._set("ready")
                self._came_up.set()
                await self._watch(process)
            else:
                failed += 1
            status = await process.wait()
            if self._ending:
                break
            self._set("starting")
            if not self._restarting:
                self.restarts += 1
                logger.warning("replica %d ended with status %d and restarts", self.number, status)
            self._restarting = False
            if failed >= _FAILED_STARTS and alone():
                raise ReplicaStartError(number=self.number, times=failed, log="\n".join(self._log))
            if failed:
                await asyncio.sleep(min(2.0 ** (failed - 1), _LONGEST_PAUSE))
        self._set("stopped")

    async def stop(self) -> None:
        """Let running requests finish, then end the server."""
        self._ending = True
        await self._end()

    async def restart(self, routed_away: float) -> None:
        """Stop the server after its last answer, and start it again. Return when it answers again.

        routed_away: seconds to wait before the stop. In this time, routers learn to send this server no new requests.
        """
        self._restarting = True
        self._came_up.clear()
        self._set("draining")
        await asyncio.sleep(routed_away)
        await self._end()
        await self._came_up.wait()

    def kill(self) -> None:
        """Kill the server and all processes that it started, for good."""
        self._ending = True
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        process = self._process = await asyncio.create_subprocess_exec(
            *child.command(self.placement, *self._words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 20,
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read_log(process))
        return process

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than one MiB
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if '"GET /health HTTP/1.1" 200' in text:  # health checks, by this command and by the router
                continue
            self._log.append(text)
            say(f"[{self.number}] {text}")

    async def _until_ready(self, process: asyncio.subprocess.Process) -> bool:
        """Wait until the server answers. Return False if its process ended before it answered."""
        while process.returncode is None:
            if await health(self.url):
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Return when the process has ended. Kill the process if it is stuck."""
        well, is_well = time.monotonic(), True
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _WATCH_SECONDS)
                return
            answer = await health(self.url)
            if answer is not None or not (self._ending or self.state == "draining"):
                is_well = bool(answer)
            if is_well:
                well = time.monotonic()
            elif time.monotonic() - well > _STUCK_SECONDS:
                logger.warning(
                    "replica %d has not been healthy for %d s, so it is killed", self.number, _STUCK_SECONDS
                )
                self._kill()

    def _set(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._changed()


async def health(url: str) -> bool | None:
    """Return whether a server's /health answers 200; None if the server refuses connections."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.get(f"{url}/health") as answer,
        ):
            return answer.status == 200
    except aiohttp.ClientConnectorError as error:
        return None if isinstance(error.os_error, ConnectionRefusedError) else False
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
