"""What is wrong with a model_config."""

from typing import Any

Fault = tuple[str, str, Any]
"""(key, what is expected, what was given)."""


class Faults(list[Fault]):
    """All faults of a config; as text a line each."""

    def __str__(self) -> str:
        return "\n".join(f"- {key}: expected {expected}, given {given!r}" for key, expected, given in self)
