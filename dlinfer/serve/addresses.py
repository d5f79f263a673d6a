"""Resolves host names, and finds addresses that servers can listen on."""

import socket

from dlinfer.serve.errors import ServeAddressError

EVERY_ADDRESS = ("0.0.0.0", "::")
"""The addresses that stand for all addresses of this machine."""


def url(host: str, port: int) -> str:
    """Return the URL of a server. host: a name or an address, of IPv6 without brackets."""
    return f"http://{_bracketed(host)}:{port}"


def numeric(host: str, port: int | str = "*") -> str:
    """Return the address of a host as numbers, which the router needs. An IPv4 address is preferred.

    port: only for the error. Raises ServeAddressError if the name is unknown.
    """
    try:
        records = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _refuse(host, port, error) from error
    records.sort(key=lambda record: record[0] != socket.AF_INET)
    return str(records[0][4][0])


def checked(host: str, port: int) -> str:
    """Return the address of a host as numbers, after a test that a server can listen on it.

    Without the test, users would wait for the model first. Raises ServeAddressError if nothing can listen there.
    """
    if not 1 <= port <= 65535:
        raise ServeAddressError(host=_bracketed(host), port=port, detail="ports are numbers from 1 to 65535")
    address = numeric(host, port)
    try:
        with _bound(address, port) as tried:
            tried.listen()
    except OSError as error:
        raise _refuse(host, port, error) from error
    return address


_held: list[socket.socket] = []


def free(host: str, count: int) -> list[tuple[str, int]]:
    """Return ``count`` free addresses of a host. Raises ServeAddressError if there are none.

    Their ports stay bound here, so that only a server with SO_REUSEADDR can listen on them.
    """
    address = numeric(host)
    try:
        _held.extend(_bound(address, 0) for _ in range(count))
    except OSError as error:
        raise _refuse(host, "*", error) from error
    return [held.getsockname()[:2] for held in _held[-count:]]


def _bound(address: str, port: int) -> socket.socket:
    new = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        new.bind((address, port))
    except OSError:
        new.close()
        raise
    return new


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _refuse(host: str, port: int | str, error: Exception) -> ServeAddressError:
    detail = getattr(error, "strerror", None) or str(error)
    return ServeAddressError(host=_bracketed(host), port=port, detail=detail)
