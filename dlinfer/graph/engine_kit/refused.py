"""Exceptions of a vendor that make torch run a region, or one call of it."""


class RefusedError(Exception):
    """A vendor does not take a region or a call of it; torch runs it, under the fallback policy.

    reason: for the report. node: name of the node that is the reason, where a single node is.
    """

    def __init__(self, reason: str, node: str = "") -> None:
        super().__init__(reason)
        self.node = node


class WrongInputError(Exception):
    """The inputs of a call are wrong, and torch says how: it runs the region, and raises.

    That is no fallback: it is neither counted nor refused under the policy ``error``.
    """
