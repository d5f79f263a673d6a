"""Reads the options of ``lmdeploy serve api_server``: keeps those for the router, refuses some, passes on the rest."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlinfer.serve.errors import ReplicaOptionError

_OWN = ("--server-name", "--server-port", "--backend", "--device")
_USE_SERVERS = "leave it out; for more servers use --replicas, or --join on another machine."

_REFUSED = {
    "--proxy-url": ("dlinfer serve has its own router", "leave it out."),
    "--ssl": (
        "the router and its servers speak plain HTTP",
        "leave it out, and put a proxy with the certificate in front of the router.",
    ),
    "--allow-terminate-by-client": ("a client would end only one of several servers", "leave it out."),
    "--enable-abort-handling": (
        "an abort would reach only one of several servers",
        "leave it out; clients close the connection to abort.",
    ),
    "--role": ("every replica prefills and decodes", _USE_SERVERS),
    "--migration-backend": ("every replica prefills and decodes", _USE_SERVERS),
    "--dist-init-addr": ("replicas share nothing", _USE_SERVERS),
    "--node-rank": ("replicas share nothing", _USE_SERVERS),
    "--nnodes": ("replicas share nothing", _USE_SERVERS),
    "--dp": ("dlinfer serve runs several servers instead", _USE_SERVERS),
}
"""Option -> (why several servers cannot use it, the user's next step)."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of the servers.

    host, port: the address for clients. passed: the options that every replica gets. program: the Python module that
    serves, and its command.
    """

    host: str
    port: int
    passed: tuple[str, ...]
    program: tuple[str, ...] = ("lmdeploy", "serve", "api_server")

    def at(self, host: str) -> "ServerOptions":
        """Return these options with another host."""
        return replace(self, host=host)


def read(words: Sequence[str], several: bool) -> ServerOptions:
    """Return the options of LMDeploy's server in ``words``, the words that the user typed.

    several: whether there is more than one server, on this machine or on others. Some options are refused only then.

    Raises ReplicaOptionError for an option that is refused.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--server-name", default="0.0.0.0")
    parser.add_argument("--server-port", type=int, default=23333)
    parser.add_argument("--backend", default="pytorch")
    parser.add_argument("--device", default="cpu")
    options, passed = parser.parse_known_args(words)
    _refuse_short_names(passed, [*_OWN, *_REFUSED] if several else _OWN)
    if options.backend != "pytorch":
        raise ReplicaOptionError(
            option=f"--backend {options.backend}",
            reason="dlinfer serves only LMDeploy's PyTorch engine",
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
                reason="replicas divide CPUs, and each would use the same device",
                advice="start one dlinfer serve with --replicas 1 for each device.",
            )
    passed += ["--backend", "pytorch", "--device", options.device]
    return ServerOptions(options.server_name, options.server_port, tuple(passed))


def _refuse_short_names(words: Sequence[str], options: Sequence[str]) -> None:
    """Raise ReplicaOptionError for the first word that is the beginning of an option.

    LMDeploy's parser takes such a word for the option. It would overrule dlinfer serve, or be overruled silently.
    """
    for word in words:
        name = word.partition("=")[0]
        full = [option for option in options if option.startswith(name)]
        if len(name) > len("--") and full and name not in options:
            reason = f"LMDeploy reads it as {' or '.join(full)}"
            raise ReplicaOptionError(option=name, reason=reason, advice="write the whole name of the option.")
