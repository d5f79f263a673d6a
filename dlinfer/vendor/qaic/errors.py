"""The errors of Qualcomm's Session API and of the engine qaic, in the form of ``dlinfer.errors``."""

from dlinfer.errors import DlinferError


class QaicOptionError(DlinferError, ValueError):
    """An option or argument of a qaic Session does not exist, or its value is not allowed."""

    message = "qaic Session: {option}={given!r} is not valid. Expected {expected}."
    next_step = "docs/vendors/qaic.md lists the options."


class QaicModelError(DlinferError, ValueError):
    """A qaic Session cannot open a model file on its backend."""

    message = "qaic Session cannot open {path!r}: {detail}."
    next_step = "{advice}"


class QaicUnavailableError(DlinferError, RuntimeError):
    """This machine lacks something that a qaic Session needs."""

    message = "qaic Session cannot {what}: {missing}."
    next_step = "{advice}"


class QaicCompileError(DlinferError, RuntimeError):
    """A compiler refused a model, or failed to compile it."""

    message = "{path!r} cannot be compiled: {detail}."
    next_step = "check the model with onnx.checker, and check the compiler's options."


class QaicInputError(DlinferError, ValueError):
    """The inputs of a run differ from the model's inputs in names, shapes or types."""

    message = "qaic Session: input {name!r}: expected {expected}, given {given}."
    next_step = (
        "session.model_input_shape_dict() lists the expected shapes and dtypes; inputs are never converted."
    )


class QaicRunError(DlinferError, RuntimeError):
    """A backend failed while it ran a model or set it up."""

    message = "qaic Session on backend {backend!r} failed: {detail}."
    next_step = "if memory ran out, use a smaller batch; else check the model and its inputs."


class QaicMetricsError(DlinferError, RuntimeError):
    """A Session was asked for measurements, but its options do not let it take any."""

    message = "{call} has nothing to show: the Session was created without {needed}."
    next_step = "create the Session with this option."
