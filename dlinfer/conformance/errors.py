"""The error of a run of conformance that cannot be made."""

from dlinfer.errors import DlinferError


class ConformanceError(DlinferError, RuntimeError):
    """A vendor cannot be asked what it claims: it is not there, cannot run here, or ends its process at once."""

    message = "vendor {vendor!r} cannot be asked: {detail}"
