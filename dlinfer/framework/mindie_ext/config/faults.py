"""The faults of a model_config."""

from typing import Any

Fault = tuple[str, str, Any]
"""A fault: the key, what is expected, and what was given."""


class Faults(list[Fault]):
    """All faults of a config."""

    def __str__(self) -> str:
        return "; ".join(f"{key}: expected {expected}, given {value!r}" for key, expected, value in self)
