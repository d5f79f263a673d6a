"""Every error of Sophgo's runtime, of sail and of the compiler, in the form of ``dlinfer.errors``."""

from dlinfer.errors import DlinferError


class SophgoUnavailableError(DlinferError, RuntimeError):
    """This machine lacks a Sophgo chip or emulator, or a package."""

    message = "{what} is not available: {reason}."
    next_step = "{advice}."


class SophgoModelError(DlinferError, ValueError):
    """A bmodel cannot be loaded: it is missing, truncated, for another chip, or refused by BMRuntime."""

    message = "the bmodel {source} cannot be loaded: {detail}."
    next_step = "{advice}."


class SophgoCallError(DlinferError, ValueError):
    """A call of the Sophgo runtime or of sail got a bad argument. Nothing has been changed."""

    message = "{call}: {detail}."
    next_step = "docs/vendors/sophgo.md describes the calls and their arguments."


class SophgoRuntimeError(DlinferError, RuntimeError):
    """BMRuntime or bmlib refused a call or failed at it. Their worker process is still running."""

    message = "{chip} failed at {call!r} ({kind}): {detail}."
    next_step = (
        "if memory ran out, free tensors or use a smaller model; else check the model and its tensors."
    )


class SophgoWorkerError(DlinferError, RuntimeError):
    """The worker process that runs BMRuntime has ended, and with it every engine and tensor on its devices."""

    message = "the worker of {chip} {how}; the call was {call!r}{log}."
    next_step = "open the model again: a new engine starts a new worker."


class SophgoTimeoutError(SophgoWorkerError, TimeoutError):
    """BMRuntime did not answer in time. Its worker process was killed."""

    message = "the worker of {chip} did not answer {call!r} in {seconds} seconds and was killed{log}."
    next_step = "open the model again; DLINFER_SOPHGO_TIMEOUT sets the time limit."


class SophgoOptionError(DlinferError, ValueError):
    """A value of an option of Sophgo's compiler or of the engine sophgo is not valid."""

    message = "sophgo: {option}={given!r} is not valid. Expected {expected}."
    next_step = "docs/vendors/sophgo_compile.md lists the options."


class SophgoCompileError(DlinferError, RuntimeError):
    """Sophgo's compiler failed."""

    message = "Sophgo's compiler cannot compile {what} to {target}: {detail}. Its log: {log}."
    next_step = "read the log, or try another quantize, another chip or a smaller net."


class SophgoLlmError(DlinferError, ValueError):
    """A bmodel is not a language model of `dlinfer compile --engine sophgo`, or cannot serve the call."""

    message = "the bmodel cannot be used to generate: {detail}."
    next_step = "compile it with `dlinfer compile --engine sophgo`; `model_tool --info` shows its content."
