"""Reads the options of ``lmdeploy serve api_server``: keeps the router's, refuses some, and passes on the rest."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlinfer.serve.errors import ReplicaOptionError

_USE_SERVERS = "leave it out; more servers are more replicas: --replicas, or --join on another machine."

_REFUSED = {
    "--proxy-url": ("the router is dlinfer's own", "leave it out."),
    "--ssl": (
        "the router and its servers speak plain HTTP",
        "leave it out, and put a proxy that has the certificate in front.",
    ),
    "--allow-terminate-by-client": ("a client would end one server of several", "leave it out."),
    "--enable-abort-handling": (
        "an abort would reach one server of several",
        "close the connection instead.",
    ),
    "--role": ("every replica reads prompts and decodes", _USE_SERVERS),
    "--migration-backend": ("every replica reads prompts and decodes", _USE_SERVERS),
    "--dist-init-addr": ("replicas share nothing", _USE_SERVERS),
    "--node-rank": ("replicas share nothing", _USE_SERVERS),
    "--nnodes": ("replicas share nothing", _USE_SERVERS),
    "--dp": ("replicas are its data parallelism", _USE_SERVERS),
}
"""Option -> why several servers cannot use it, and the user's next step."""


@dataclass(frozen=True)
class ServerOptions:
    """The server's options.

    host, port: the address for clients. passed: the options that every replica gets.
    """

    host: str
    port: int
    passed: tuple[str, ...]

    def at(self, host: str) -> "ServerOptions":
        """Return these options with another host."""
        return replace(self, host=host)


def read(words: Sequence[str], several: bool) -> ServerOptions:
    """Return the options of LMDeploy's server that are in ``words``, as the user typed them.

    several: whether there is more than one server, on this machine or on others.

    Raises ReplicaOptionError for an option that cannot be used.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--server-name", default="0.0.0.0")
    parser.add_argument("--server-port", type=int, default=23333)
    parser.add_argument("--backend", default="pytorch")
    parser.add_argument("--device", default="cpu")
    options, passed = parser.parse_known_args(words)
    if options.backend != "pytorch":
        raise ReplicaOptionError(
            option=f"--backend {options.backend}",
            reason="dlinfer is in the PyTorch engine",
            advice="leave it out.",
        )
    if several:
        names = [word.partition("=")[0] for word in passed]
        for option, (reason, advice) in _REFUSED.items():
            if option in names:
                raise ReplicaOptionError(option=option, reason=reason, advice=advice)
        if options.device != "cpu":
            raise ReplicaOptionError(
                option=f"--device {options.device}",
                reason="replicas share out CPUs, and each would take the same device",
                advice="start one server for each device, with --replicas 1.",
            )
    passed += ["--backend", "pytorch", "--device", options.device]
    return ServerOptions(options.server_name, options.server_port, tuple(passed))
