"""Exceptions that a vendor raises to make torch run a region, or one call of a region."""


class RefusedError(Exception):
    """A vendor refuses a region, or one call of a region. Torch runs the region or the call, under the fallback policy.

    reason: the text for the report.
    node: the name of the node that caused the refusal; empty if no single node did.
    """

    def __init__(self, reason: str, node: str = "") -> None:
        super().__init__(reason)
        self.node = node


class WrongInputError(Exception):
    """A call's inputs are wrong. Torch runs the region and raises its own error.

    This is no fallback: dlinfer does not count it, and the policy ``error`` does not refuse it.
    """
