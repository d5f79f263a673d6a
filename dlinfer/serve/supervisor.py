"""Runs the replicas and the router, and handles signals.

SIGTERM and SIGINT: refuse new requests, let running requests finish, then end. A second signal kills the replicas, and
running requests fail.
SIGHUP: restart the replicas one after another, while the other replicas serve.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from dlinfer.serve import addresses
from dlinfer.serve.control import Control, Joined
from dlinfer.serve.join import Membership
from dlinfer.serve.options import ServerOptions
from dlinfer.serve.output import say
from dlinfer.serve.placement import Placement
from dlinfer.serve.replica import Replica
from dlinfer.serve.router import Router

logger = logging.getLogger("dlinfer")

# How long a replica goes on serving after it leaves the router's list. The router reads the new list within
# milliseconds, and requests that it sent before arrive in this time. A router on another machine is told up to a second
# later.
_ROUTED_AWAY_SECONDS = 1.0
_ROUTED_AWAY_ELSEWHERE_SECONDS = 3.0
_HOLD_SECONDS = 0.2


class Supervisor:
    """Everything that ``dlinfer serve`` runs on this machine.

    model: the model of every replica.
    options: the options of the servers.
    placements: one placement for each replica.
    join_key: a secret. Without ``router_url``, other machines that know it may join this machine's router; None lets no
        machine join. With ``router_url``, it lets this machine join the other machine's router.
    router_url: the URL of a router on another machine, which sends requests to this machine. None: a router runs here,
        if one is needed.
    """

    def __init__(
        self,
        model: str,
        options: ServerOptions,
        placements: Sequence[Placement],
        join_key: str | None = None,
        router_url: str | None = None,
    ) -> None:
        self._options = options
        self._joined = Joined(self._changed)
        self._router: Router | None = None
        self._router_url, self._join_key = router_url, join_key
        # A single server that no other machine can join needs no router: it listens for clients itself.
        self._alone = len(placements) == 1 and join_key is None and router_url is None
        host = "127.0.0.1"
        if self._alone or router_url is not None:
            host = options.host
        listen = [(options.host, options.port)] if self._alone else addresses.free(host, len(placements))
        self._replicas = [
            Replica(number, self._command(model, address), address, placement, self._changed)
            for number, (address, placement) in enumerate(zip(listen, placements, strict=True))
        ]
        self._routed_away = _ROUTED_AWAY_SECONDS if router_url is None else _ROUTED_AWAY_ELSEWHERE_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()
        self._membership: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None]
        self._stopping = False
        self._rolling = asyncio.Lock()
        self._change = asyncio.Event()

    def _command(self, model: str, address: tuple[str, int]) -> list[str]:
        host, port = address
        where = ["--server-name", host, "--server-port", str(port)]
        return [sys.executable, "-m", *self._options.program, model, *self._options.passed, *where]

    async def run(self) -> None:
        """Serve until a signal ends the command.

        Raises the error of the router or of all replicas if they fail. With ``router_url``, also raises the error of
        ``Membership``, which announces this machine's servers to the other machine's router.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for which in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(which, self._stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._restart_all()))
        with tempfile.TemporaryDirectory(prefix="dlinfer-serve-") as folder:
            control = Control(self._replicas, self._joined, self._router_metrics, self._join_key)
            try:
                if not self._alone and self._router_url is None:
                    listen = (self._options.host, self._options.port)
                    self._router = Router(Path(folder), listen, await control.start())
                    self._spawn(self._router.run())
                for replica in self._replicas:
                    logger.info("replica %d: %s, %s", replica.number, replica.url, replica.placement)
                    self._spawn(replica.run(self._nobody_serves))
                self._spawn(self._announce())
                if self._router_url is None:
                    self._spawn(self._expire())
                else:
                    member = Membership(self._router_url, self._join_key or "", self._ready_urls)
                    self._membership = self._spawn(member.run())
                await self._ended
            finally:
                await self._end_all()
                await control.stop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _changed(self) -> None:
        """Tell the router which servers accept requests now."""
        self._change.set()
        if self._router is not None and not self._stopping:
            self._router.send_to([*self._ready_urls(), *self._joined.seen])

    async def _router_metrics(self) -> str:
        return "" if self._router is None else await self._router.metrics()

    def _ready_urls(self) -> list[str]:
        return [replica.url for replica in self._replicas if replica.ready]

    def _nobody_serves(self) -> bool:
        return not any(replica.ready for replica in self._replicas)

    async def _announce(self) -> None:
        """Print the URL once all replicas answer."""
        while len(self._ready_urls()) < len(self._replicas):
            self._change.clear()
            await self._change.wait()
        if self._router is not None:
            for replica in self._replicas:
                while not (await self._router.accepts() and await self._router.serves(replica.url)):
                    await asyncio.sleep(_HOLD_SECONDS)
        host = self._options.host
        if host in addresses.EVERY_ADDRESS:
            host = socket.gethostname()
        url = self._router_url or addresses.url(host, self._options.port)
        count = len(self._replicas)
        replicas = f"{count} replica{'s' * (count > 1)} of process {os.getpid()}"
        say(f"dlinfer serve: ready at {url} with {replicas}")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._joined.expire()

    async def _restart_all(self) -> None:
        if len(self._replicas) == 1:
            logger.warning("the only replica restarts, so requests fail until it is ready")
        async with self._rolling:
            for replica in self._replicas:
                if replica.ready:
                    await replica.restart(self._routed_away)
                    while self._router is not None and not await self._router.serves(replica.url):
                        await asyncio.sleep(_HOLD_SECONDS)
        say("dlinfer serve: all replicas were restarted")

    def _stop(self) -> None:
        if self._stopping:
            for replica in self._replicas:
                replica.kill()
            return
        self._stopping = True
        self._spawn(self._drain())
        say("dlinfer serve: refusing new requests and finishing the running ones")

    async def _drain(self) -> None:
        if self._router is not None:
            await self._router.refuse()
            while await self._router.unanswered():
                await asyncio.sleep(_HOLD_SECONDS)
        if self._membership is not None:
            self._membership.cancel()
            await asyncio.gather(self._membership, return_exceptions=True)
            await asyncio.sleep(self._routed_away)
        await asyncio.gather(*(replica.stop() for replica in self._replicas))
        if not self._ended.done():
            self._ended.set_result(None)

    async def _end_all(self) -> None:
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(replica.stop() for replica in self._replicas)), 30)
        for replica in self._replicas:
            replica.kill()
        if self._router is not None:
            await self._router.kill()
