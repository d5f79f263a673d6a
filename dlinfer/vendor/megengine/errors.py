"""All errors that a user of MegEngine Lite can meet, in the form of ``dlinfer.errors``."""

from dlinfer.errors import DlinferError


class LiteError(DlinferError, RuntimeError):
    """A call of MegEngine Lite's C library failed; ``detail`` is the library's message."""

    message = "MegEngine Lite: {call}: {detail}."
    next_step = "docs/vendors/megengine.md describes what each call needs."


class LiteArgumentError(DlinferError, ValueError):
    """The caller passed a bad argument to the Lite API. The C library was not called."""

    message = "MegEngine Lite: {call}: argument {argument}: expected {expected}, given {given}."
    next_step = "docs/vendors/megengine.md lists the types and ranges; values are never changed to fit."


class LiteModelError(LiteError):
    """A model file cannot be loaded: it is missing or damaged, or the key is wrong."""

    message = "MegEngine Lite: the model {path!r} cannot be loaded: {detail}."
    next_step = "check the file; for an encrypted file, check the method's name and the key."


class LiteLackError(LiteError, NotImplementedError):
    """The installed build of the C library lacks a documented function."""

    message = "MegEngine Lite: {call}: this build of the library lacks the function: {detail}."
    next_step = "docs/vendors/megengine.md lists what this build lacks, and what to use instead."


class LiteCallbackError(LiteError):
    """A user's callback or decryption function raised an exception, which is this error's ``__cause__``."""

    message = "MegEngine Lite: the {callback} of the network raised {detail}."
    next_step = "fix the callback; the network can be run again."


class LiteBusyError(LiteError):
    """A network was started while a network that shares its run-time memory was running."""

    message = (
        "MegEngine Lite: {call}: the network shares run-time memory with another network that is running."
    )
    next_step = "call wait() of the other network first, or share only weights (share_weights_with)."


class LiteBuildError(DlinferError, RuntimeError):
    """MegEngine could not build a model from a graph in its toolchain's environment."""

    message = "MegEngine cannot build this graph: {detail}."
    next_step = "use fallback 'warn' or 'allow' to run the graph by torch, or use another engine."
