"""Every error of Sophgo's runtime, of sail and of the compiler, in the form of ``dlinfer.errors``."""

from dlinfer.errors import DlinferError


class SophgoUnavailableError(DlinferError, RuntimeError):
    """Something of Sophgo's that is needed is not on this machine: a chip or its emulator."""

    message = "{what} is not available: {reason}."
    next_step = "{advice}."


class SophgoModelError(DlinferError, ValueError):
    """A bmodel cannot be loaded: missing, not whole, for another chip, or refused by BMRuntime."""

    message = "the bmodel {source} cannot be loaded: {detail}."
    next_step = "{advice}."


class SophgoCallError(DlinferError, ValueError):
    """A call of the Sophgo runtime or of sail with something it does not take; nothing was changed."""

    message = "{call}: {detail}."
    next_step = "docs/vendors/sophgo.md says what each call takes."


class SophgoRuntimeError(DlinferError, RuntimeError):
    """BMRuntime or bmlib refused or failed; its worker goes on."""

    message = "{chip} failed at {call!r} ({kind}): {detail}."
    next_step = (
        "if memory ran out, free tensors or use a smaller model; else check the model and its tensors."
    )


class SophgoWorkerError(DlinferError, RuntimeError):
    """The process in which BMRuntime runs is gone, and with it every engine and tensor on its devices."""

    message = "the worker of {chip} {how}; it was asked for {call!r}{log}."
    next_step = "open the model again: a new engine starts a new worker."


class SophgoTimeoutError(SophgoWorkerError, TimeoutError):
    """BMRuntime did not answer in time; its worker was ended."""

    message = "the worker of {chip} gave no answer to {call!r} in {seconds} seconds and was ended{log}."
    next_step = "open the model again; DLINFER_SOPHGO_TIMEOUT sets the time."


class SophgoOptionError(DlinferError, ValueError):
    """An option of Sophgo's compiler or of the engine sophgo that does not exist or has no such value."""

    message = "sophgo: {option}={given!r} is not valid. Expected {expected}."
    next_step = "docs/vendors/sophgo_compile.md lists the options."


class SophgoCompileError(DlinferError, RuntimeError):
    """Sophgo's compiler did not make what it was asked for."""

    message = "{what} cannot be compiled to {target} by Sophgo's compiler: {detail}. Its log: {log}."
    next_step = "read the log; another quantize or chip, or a smaller net, may be taken."


class SophgoLlmError(DlinferError, ValueError):
    """A bmodel is no language model as `dlinfer compile --engine sophgo` makes them, or lacks what is asked of it."""

    message = "the bmodel cannot be used to generate: {detail}."
    next_step = "make it with `dlinfer compile --engine sophgo`; `model_tool --info` shows what it holds."
