"""The adaptor's own errors, and how errors of other libraries are quoted."""

from dlinfer.errors import DlinferError


def in_short(error: BaseException) -> str:
    """Class and first line of an error whose text may be a page."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip(' :.')}" if lines else type(error).__name__


class NoCudaError(DlinferError, RuntimeError):
    """LMDeploy is to run on a CUDA device, and torch sees none."""

    message = "device 'cuda' was asked for, and torch sees no CUDA device here."
    next_step = "leave it out, or ask for --device cpu (device_type='cpu' in Python)."


class QuantisationSourceError(DlinferError, ValueError):
    """A model folder whose weights cannot be quantised to the format that was asked for."""

    message = "the model {path!r} cannot be quantised to {form}: {detail}."
    next_step = "{advice}"


class QuantisationOutputError(DlinferError, OSError):
    """The folder that a quantised model is to be written to exists, or cannot be written."""

    message = "the quantised model cannot be written to {path!r}: {detail}."
    next_step = "{advice}"


class CalibrationError(DlinferError, RuntimeError):
    """A model cannot be quantised with a look at data: no such library, a text that is too short, a run that failed."""

    message = "the model {path!r} cannot be calibrated: {detail}."
    next_step = "{advice}"


class LossError(DlinferError, RuntimeError):
    """The loss of a model by packing cannot be measured: a format, a text, or a model that is not served."""

    message = "the loss of {path!r} cannot be measured: {detail}."
    next_step = "{advice}"


class NoDeviceGraphError(DlinferError, RuntimeError):
    """Steps are to be captured into a device's graphs, and its torch package has none."""

    message = "steps cannot be captured: {module} has no {name}."
    next_step = "set eager_mode=True, or install a build of the device's torch package that has it."


class CapturedStepError(DlinferError, RuntimeError):
    """A decoding step could not be captured: an op that it runs cannot be a part of a graph."""

    message = "a decoding step of {rows} rows cannot be captured: {detail}."
    next_step = "set eager_mode=True; the op named there asks the host, or is not for graphs."
