"""Copies of faults that dlinfer once had, put into a worker process to see that the fuzzer finds them."""

from collections.abc import Callable

VARIABLE = "FUZZ_PLANT"

FAULTS: dict[str, Callable[[], None]] = {}


def plant(name: str) -> None:
    """Put a fault in place; none for an empty name."""
    if name:
        FAULTS[name]()
