"""The adaptor's own errors."""

from dlinfer.errors import DlinferError


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
    """What a model loses by packing cannot be measured: a format, a text, or a model that is not served."""

    message = "the loss of {path!r} cannot be measured: {detail}."
    next_step = "{advice}"
