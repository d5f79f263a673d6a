"""Announces this machine's servers to a router on another machine."""

import asyncio
import logging
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import aiohttp

from dlinfer.serve.control import JOIN_PATH, LEASE_SECONDS
from dlinfer.serve.errors import JoinError

logger = logging.getLogger("dlinfer")


def local_address(router_url: str) -> str:
    """Return the address of this machine on the route to the router. Raises JoinError for a bad or unreachable URL."""
    parts = urlsplit(router_url)
    if parts.scheme != "http" or not parts.hostname:
        raise JoinError(url=router_url, detail="it is not http://HOST:PORT", advice="correct --join.")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise JoinError(
            url=router_url, detail=str(error), advice="correct --join, or start the router first."
        ) from None


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
