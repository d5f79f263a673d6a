"""Defines the adaptor's own errors, and functions that quote other errors in their messages."""

import signal

from dlinfer.errors import DlinferError


def in_short(error: BaseException) -> str:
    """Return an error's class name and the first line of its text. The full text may fill a page."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip(' :.')}" if lines else type(error).__name__


def ending(exitcode: int | None) -> str:
    """Return a text that says how a process ended. exitcode: the ``exitcode`` of a multiprocessing.Process."""
    if exitcode is not None and exitcode < 0:
        hint = " (as the system does when memory runs out)" if -exitcode == signal.SIGKILL else ""
        return f"it was killed by {signal.Signals(-exitcode).name}{hint}"
    return f"its exit status was {exitcode}"


class RankEndedError(DlinferError, RuntimeError):
    """One of the processes of a tensor-parallel model (tp > 1) has ended, so no more tokens can be computed."""

    message = "the process of rank {rank} of {ranks} ended: {how}. dlinfer ends the other ranks too."
    next_step = "start the engine again; if memory ran out, use a smaller KV cache (num_gpu_blocks)."


class NoCudaError(DlinferError, RuntimeError):
    """The user asked LMDeploy for a CUDA device, but torch sees none."""

    message = "device 'cuda' was requested, but torch sees no CUDA device."
    next_step = "leave the device out, or use --device cpu (device_type='cpu' in Python)."


class QuantisationSourceError(DlinferError, ValueError):
    """The weights in a model folder cannot be quantised to the requested format."""

    message = "the model {path!r} cannot be quantised to {form}: {detail}."
    next_step = "{advice}"


class QuantisationOutputError(DlinferError, OSError):
    """The output folder for a quantised model already exists, or cannot be written."""

    message = "the quantised model cannot be written to {path!r}: {detail}."
    next_step = "{advice}"


class CalibrationError(DlinferError, RuntimeError):
    """Calibration of a model failed: auto-round is missing, the text is too short, or the run itself failed."""

    message = "the model {path!r} cannot be calibrated: {detail}."
    next_step = "{advice}"


class LossError(DlinferError, RuntimeError):
    """The loss caused by packing a model's weights cannot be measured for this format, text or model."""

    message = "the loss of {path!r} cannot be measured: {detail}."
    next_step = "{advice}"


class NoDeviceGraphError(DlinferError, RuntimeError):
    """Graph mode needs device graphs (like CUDA graphs), but the device's torch package does not offer them."""

    message = "decoding steps cannot be captured as graphs: {module} has no {name}."
    next_step = "set eager_mode=True, or install a build of the device's torch package that has it."


class CapturedStepError(DlinferError, RuntimeError):
    """A decoding step could not be captured, because one of its ops cannot be part of a device graph."""

    message = "a decoding step of {rows} rows cannot be captured as a graph: {detail}."
    next_step = "set eager_mode=True. The op that the error names needs the host, or cannot be captured."
