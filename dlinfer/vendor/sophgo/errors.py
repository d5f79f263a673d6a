"""All errors of Sophgo's runtime, of sail and of the compiler, in the form of ``dlinfer.errors``."""

from dlinfer.errors import DlinferError


class SophgoUnavailableError(DlinferError, RuntimeError):
    """This machine lacks a Sophgo chip and its emulator, or a package."""

    message = "{what} is not available: {reason}."
    next_step = "{advice}."


class SophgoModelError(DlinferError, ValueError):
    """A bmodel cannot be loaded: it is missing, truncated, for another chip, or refused by BMRuntime."""

    message = "the bmodel {source} cannot be loaded: {detail}."
    next_step = "{advice}."


class SophgoCallError(DlinferError, ValueError):
    """The caller passed a bad argument to the Sophgo runtime or to sail. Nothing was changed."""

    message = "{call}: {detail}."
    next_step = "docs/vendors/sophgo.md describes the calls and their arguments."


class SophgoRuntimeError(DlinferError, RuntimeError):
    """BMRuntime or bmlib, the SDK's C libraries, refused a call or failed. The worker process is still running."""

    message = "{chip} failed at {call!r} ({kind}): {detail}."
    next_step = (
        "if memory ran out, free tensors or use a smaller model; else check the model and its tensors."
    )


class SophgoWorkerError(DlinferError, RuntimeError):
    """The worker process that runs BMRuntime has ended. All engines and tensors on its devices are lost."""

    message = "the worker of {chip} {how}; the call was {call!r}{log}."
    next_step = "open the model again: a new engine starts a new worker."


class SophgoTimeoutError(SophgoWorkerError, TimeoutError):
    """BMRuntime did not answer in time, so its worker process was killed."""

    message = "the worker of {chip} did not answer {call!r} in {seconds} seconds and was killed{log}."
    next_step = "open the model again; DLINFER_SOPHGO_TIMEOUT sets the time limit."


class SophgoOptionError(DlinferError, ValueError):
    """An option of Sophgo's compiler or of the engine sophgo has a wrong value."""

    message = "sophgo: {option}={given!r} is not valid. Expected {expected}."
    next_step = "docs/vendors/sophgo_compile.md lists the options."


class SophgoCompileError(DlinferError, RuntimeError):
    """Sophgo's compiler failed."""

    message = "Sophgo's compiler cannot compile {what} to {target}: {detail}. Its log: {log}."
    next_step = "read the log, or try another quantize, another chip or a smaller net."


class SophgoLlmError(DlinferError, ValueError):
    """A bmodel is not a language model that `dlinfer compile --engine sophgo` wrote, or it cannot serve the call."""

    message = "the bmodel cannot be used to generate: {detail}."
    next_step = "compile it with `dlinfer compile --engine sophgo`; `model_tool --info` shows its content."
