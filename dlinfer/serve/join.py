"""Announces this machine's servers to a router on another machine."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import aiohttp

from dlinfer.serve.control import JOIN_PATH, LEASE_SECONDS
from dlinfer.serve.errors import JoinError

logger = logging.getLogger("dlinfer")


def router_address(router_url: str) -> tuple[str, int]:
    """Return host and port of a router's URL. Raises JoinError for a bad URL."""
    try:
        parts = urlsplit(router_url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise JoinError(url=router_url, detail=str(error), advice="correct --join.") from None
    if parts.scheme != "http" or not host:
        raise JoinError(url=router_url, detail="it is not http://HOST:PORT", advice="correct --join.")
    return host, port or 80


def local_address(router_url: str) -> str:
    """Return the address of this machine on the route to the router. Raises JoinError for a bad or unreachable URL."""
    host, port = router_address(router_url)
    reason: Exception | None = None
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(address)  # sends nothing
                    return probe.getsockname()[0]
            except OSError as error:
                reason = error
    except (OSError, UnicodeError) as error:  # the name is unknown, or is no name
        reason = error
    advice = "check that this machine can resolve and reach that host."
    detail = getattr(reason, "strerror", None) or str(reason)
    raise JoinError(url=router_url, detail=detail, advice=advice)


class Membership:
    """Announces this machine's servers to a router again and again, until ``run`` is cancelled. Then it withdraws them.

    router_url: the router's URL. key: the secret of both machines. ready: returns the URLs of the servers that accept
    requests.
    """

    def __init__(self, router_url: str, key: str, ready: Callable[[], list[str]]) -> None:
        self._url = router_url.rstrip("/") + JOIN_PATH
        self._key, self._ready = key, ready
        self._named: set[str] = set()

    async def run(self) -> None:
        """Announce the servers until cancelled. Raises JoinError if the router refuses.

        If the router does not answer, the next announcement tries again.
        """
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout, headers={"x-join-key": self._key}) as client:
            try:
                while True:
                    try:
                        await self._name(client)
                    except (aiohttp.ClientError, OSError, TimeoutError) as error:
                        logger.warning(
                            "the router %s does not answer (%s); dlinfer serve tries again", self._url, error
                        )
                    await asyncio.sleep(1)
            finally:
                # A router that is down forgets the servers by itself.
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    await client.delete(self._url, json={"urls": sorted(self._named)})

    async def _name(self, client: aiohttp.ClientSession) -> None:
        ready = set(self._ready())
        if gone := self._named - ready:
            await client.delete(self._url, json={"urls": sorted(gone)})
        async with client.put(self._url, json={"urls": sorted(ready)}) as answer:
            if answer.status in (400, 403, 404, 405):
                advice = (
                    "pass --join-key with the same secret on both machines, and --join with the router's URL."
                )
                raise JoinError(
                    url=self._url, detail=f"it answers {answer.status} {await answer.text()}", advice=advice
                )
        self._named = ready


assert LEASE_SECONDS > 5  # several rounds of the loop above
