"""The error of a conformance run that cannot start or has no results."""

from dlinfer.errors import DlinferError


class ConformanceError(DlinferError, RuntimeError):
    """A vendor cannot be checked: it is not installed, cannot run here, or ends its process at once."""

    message = "vendor {vendor!r} cannot be tested: {detail}"
