"""The supervisor's own HTTP server. The router sends it the requests for ``/metrics`` and ``/dlinfer``.

- ``GET /metrics`` returns the counters of all replicas and of the router.
- ``GET /dlinfer/replicas`` returns the states of the replicas.
- ``PUT /dlinfer/replicas`` with ``{"urls": [...]}`` adds servers of another machine for ``LEASE_SECONDS``. The other
  machine repeats the request before the time ends.
- ``DELETE /dlinfer/replicas`` with ``{"urls": [...]}`` removes such servers.

PUT and DELETE need the secret in the file that ``--join-key`` names.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from prometheus_client import Metric

from dlinfer.serve import addresses
from dlinfer.serve.metrics import merge
from dlinfer.serve.replica import Replica

JOIN_PATH = "/dlinfer/replicas"
LEASE_SECONDS = 15.0


@dataclass
class Joined:
    """The servers of other machines.

    changed: called when the set of servers changes. seen: URL of a server -> the time when it was last announced.
    """

    changed: Callable[[], None]
    seen: dict[str, float] = field(default_factory=dict)

    def add(self, urls: Iterable[str]) -> None:
        """Add these servers, or prolong their lease."""
        before = len(self.seen)
        self.seen |= dict.fromkeys(urls, time.monotonic())
        if len(self.seen) != before:
            self.changed()

    def remove(self, urls: Iterable[str]) -> None:
        """Remove these servers."""
        for url in urls:
            self.seen.pop(url, None)
        self.changed()

    def expire(self) -> None:
        """Remove the servers that were not announced for LEASE_SECONDS."""
        late = time.monotonic() - LEASE_SECONDS
        if gone := [url for url, when in self.seen.items() if when < late]:
            self.remove(gone)


class Control:
    """The HTTP server.

    router_metrics: returns the router's counters as text. key: the secret that lets other machines join. With None, no
    machine can join.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        joined: Joined,
        router_metrics: Callable[[], Awaitable[str]],
        key: str | None,
    ) -> None:
        self._replicas, self._joined, self._router_metrics, self._key = replicas, joined, router_metrics, key
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen on a free port of this machine, and return the server's URL."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get(JOIN_PATH, self._list),
                web.put(JOIN_PATH, self._join),
                web.delete(JOIN_PATH, self._leave),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        _, port = self._runner.addresses[0][:2]
        return f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _list(self, _: web.Request) -> web.Response:
        replicas = [
            {"number": replica.number, "state": replica.state, "restarts": replica.restarts}
            for replica in self._replicas
        ]
        return web.json_response({"replicas": replicas, "joined": len(self._joined.seen)})

    async def _join(self, request: web.Request) -> web.Response:
        urls = await self._allowed_urls(request)
        self._joined.add(urls)
        return web.json_response({"joined": len(urls)})

    async def _leave(self, request: web.Request) -> web.Response:
        self._joined.remove(await self._allowed_urls(request))
        return web.json_response({})

    async def _allowed_urls(self, request: web.Request) -> list[str]:
        secret = request.headers.get("x-join-key", "")
        if self._key is None or not hmac.compare_digest(secret.encode(), self._key.encode()):
            raise web.HTTPForbidden(
                text="the join key is wrong, or this router was started without --join-key"
            )
        try:
            urls = (await request.json())["urls"]
            parts = [urlsplit(url) for url in urls]
            if not all(part.scheme == "http" and part.hostname and part.port for part in parts):
                raise ValueError("a URL is not http://HOST:PORT")
        except (ValueError, TypeError, KeyError) as error:
            raise web.HTTPBadRequest(text=f"urls: {error}") from error
        return [addresses.url(part.hostname or "", part.port or 0) for part in parts]

    async def _metrics(self, request: web.Request) -> web.Response:
        servers = {str(replica.number): replica.url for replica in self._replicas if replica.ready}
        servers |= {url.removeprefix("http://"): url for url in self._joined.seen}
        # A server that was started with --api-keys asks for a key here too.
        headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        answers = await asyncio.gather(*(_scrape(url, headers) for url in servers.values()))
        if 401 in answers:
            raise web.HTTPUnauthorized
        texts = {name: text for name, text in zip(servers, answers, strict=True) if isinstance(text, str)}
        own = merge(texts, self._own())
        return web.Response(text=own + await self._router_metrics(), content_type="text/plain")

    def _own(self) -> list[Metric]:
        ready = Metric(
            "dlinfer:replicas_ready",
            "Replicas that get requests, including those of other machines.",
            "gauge",
        )
        ready.add_sample(
            ready.name, {}, sum(replica.ready for replica in self._replicas) + len(self._joined.seen)
        )
        restarts = Metric(
            "dlinfer:replica_restarts",
            "How often a replica ended by itself and was restarted.",
            "counter",
        )
        for replica in self._replicas:
            restarts.add_sample(f"{restarts.name}_total", {"replica": str(replica.number)}, replica.restarts)
        return [ready, restarts]


async def _scrape(url: str, headers: dict[str, str]) -> str | int:
    """Return the text of a server's /metrics.

    Return the HTTP status if it is not 200, and 0 if the server does not answer.
    """
    timeout = aiohttp.ClientTimeout(total=5)
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as client,
            client.get(f"{url}/metrics") as answer,
        ):
            return await answer.text() if answer.status == 200 else answer.status
    return 0
