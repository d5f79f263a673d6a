"""Names become addresses of the right family, and what cannot be listened on is an error with a next step."""

import socket

import pytest

from dlinfer.serve import addresses
from dlinfer.serve.errors import ServeAddressError

UNKNOWN = "no-such-host.invalid"
NOT_OURS = "192.0.2.1"  # for documentation: RFC 5737


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::", "::"), ("0:0::1", "::1")],
)
def test_addresses_are_numeric(host: str, expected: str):
    assert addresses.numeric(host) == expected


def test_ipv6_has_brackets_in_a_url():
    assert addresses.url("::", 80) == "http://[::]:80"
    assert addresses.url("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert addresses.url("my-host", 80) == "http://my-host:80"


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6), "localhost"])
def test_free_addresses(host: str):
    listen = addresses.free(host, 3)
    assert len({port for _, port in listen}) == 3
    for address, port in listen:
        assert address == addresses.numeric(host)
        assert addresses.checked(host, port) == address


@pytest.mark.parametrize("port", [0, -1, 65536, 70000])
def test_ports_that_do_not_exist(port: int):
    with pytest.raises(ServeAddressError, match=f":{port}: ports are numbers from 1 to 65535"):
        addresses.checked("127.0.0.1", port)


@pytest.mark.parametrize("host", [UNKNOWN, "x" * 70, NOT_OURS])
def test_hosts_that_are_not_here(host: str):
    advice = "choose a free port with --server-port, or an address of this machine with --server-name"
    with pytest.raises(ServeAddressError, match=rf"cannot listen on {host}:\*: .*{advice}"):
        addresses.free(host, 1)
    with pytest.raises(ServeAddressError, match=rf"cannot listen on {host}:8000: .*{advice}"):
        addresses.checked(host, 8000)


@needs_ipv6
def test_an_ipv6_port_in_use():
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(ServeAddressError, match=rf"on \[::1\]:{port}: Address already in use"):
            addresses.checked("::1", port)
