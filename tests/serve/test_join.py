"""The URL of a router on another machine, and a membership that ends."""

import asyncio

import pytest

from dlinfer.serve import addresses
from dlinfer.serve.errors import JoinError
from dlinfer.serve.join import Membership, local_address, router_address
from tests.serve.test_addresses import UNKNOWN, needs_ipv6


@pytest.mark.parametrize(
    ("url", "detail"),
    [
        ("http://host:99999", "Port out of range"),
        ("http://host:port", "Port could not be cast"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("https://host", "it is not http://HOST:PORT"),
        ("host:8000", "it is not http://HOST:PORT"),
        ("", "it is not http://HOST:PORT"),
    ],
)
def test_bad_urls(url: str, detail: str):
    for read in (router_address, local_address):
        with pytest.raises(JoinError, match=rf"{detail}.*correct --join\."):
            read(url)


def test_good_urls():
    assert router_address("http://host/") == ("host", 80)
    assert router_address("http://[::1]:8000") == ("::1", 8000)
    assert local_address("http://127.0.0.1:8000") == "127.0.0.1"
    assert local_address("http://localhost:8000") in ("127.0.0.1", "::1")


@needs_ipv6
def test_a_router_with_an_ipv6_address():
    assert local_address("http://[::1]:8000") == "::1"


@pytest.mark.parametrize("host", [UNKNOWN, "x" * 70])
def test_an_unknown_host(host: str):
    with pytest.raises(JoinError, match="check that this machine can resolve and reach that host"):
        local_address(f"http://{host}:8000")


def test_a_membership_ends_though_the_router_is_down():
    ((host, port),) = addresses.free("127.0.0.1", 1)  # nobody listens there

    async def join_and_leave() -> BaseException | None:
        member = asyncio.create_task(Membership(addresses.url(host, port), "key", list).run())
        await asyncio.sleep(0.3)
        assert not member.done()
        member.cancel()
        (ended,) = await asyncio.wait_for(asyncio.gather(member, return_exceptions=True), 60)
        return ended

    assert isinstance(asyncio.run(join_and_leave()), asyncio.CancelledError)
