"""Every error that a user of MegEngine Lite can meet, in the form of ``dlinfer.errors``."""

from dlinfer.errors import DlinferError


class LiteError(DlinferError, RuntimeError):
    """A call of MegEngine Lite's C library failed; ``detail`` is the library's message."""

    message = "MegEngine Lite: {call}: {detail}."
    next_step = "docs/vendors/megengine.md describes what each call needs."


class LiteArgumentError(DlinferError, ValueError):
    """A call of the Lite API got a bad argument; the library was not called."""

    message = "MegEngine Lite: {call}: argument {argument}: expected {expected}, given {given}."
    next_step = "docs/vendors/megengine.md lists the types and ranges; values are never changed to fit."


class LiteModelError(LiteError):
    """A model file that cannot be loaded: missing, damaged, or decrypted with a wrong key."""

    message = "MegEngine Lite: the model {path!r} cannot be loaded: {detail}."
    next_step = "check the file; for an encrypted file, check the method's name and the key."


class LiteLackError(LiteError, NotImplementedError):
    """The installed build of the C library lacks a function that is documented."""

    message = "MegEngine Lite: {call}: this build of the library lacks the function: {detail}."
    next_step = "docs/vendors/megengine.md lists what this build lacks, and what to use instead."


class LiteCallbackError(LiteError):
    """A user's callback or decryption function raised an exception, which is the cause of this error."""

    message = "MegEngine Lite: the {callback} of the network raised {detail}."
    next_step = "fix the callback; the network can be run again."


class LiteBusyError(LiteError):
    """A network was started while another network was running that shares its run-time memory."""

    message = (
        "MegEngine Lite: {call}: the network shares run-time memory with another network that is running."
    )
    next_step = "call wait() of the other network first, or share only weights (share_weights_with)."


class LiteBuildError(DlinferError, RuntimeError):
    """MegEngine could not build a model of a graph in its toolchain's environment."""

    message = "MegEngine cannot build this graph: {detail}."
    next_step = "use fallback 'warn' or 'allow' to run the graph by torch, or use another engine."
