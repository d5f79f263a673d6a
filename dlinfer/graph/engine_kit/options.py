"""An engine's own options: a dataclass whose fields say what values they take.

::

    @dataclass(frozen=True)
    class MyOptions(EngineOptions):
        precision: str = option("model", one_of("model", "f16"))
        num_threads: int = option(0, whole(0, "a number of threads, 0 or more"))

Users give them as ``options={"engine_options": {...}}`` or in DLINFER_ENGINE_OPTIONS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from dlinfer.errors import CompileOptionError

Reader = Callable[[Any], Any]
"""Takes what a user gave, gives the value of the field. Raises ExpectedError. It takes its own results as they are."""

_Self = TypeVar("_Self", bound="EngineOptions")


class ExpectedError(Exception):
    """A value is not what its field takes; the text says what the field takes."""


def option(default: Any, read: Reader) -> Any:
    """A field of EngineOptions."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class EngineOptions:
    """No options yet. Making one reads every field, and raises CompileOptionError for the first that is wrong."""

    def __post_init__(self) -> None:
        for item in fields(self):
            given = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, item.metadata["read"](given))
            except ExpectedError as error:
                refuse(item.name, given, str(error))

    @classmethod
    def of(cls: type[_Self], given: Mapping[str, Any]) -> _Self:
        """Options by name. Raises CompileOptionError, for an unknown one with the names that there are."""
        known = [item.name for item in fields(cls)]
        for name, value in given.items():
            if name not in known:
                there = (
                    f"one of the engine's options: {', '.join(known)}" if known else "none: it has no options"
                )
                refuse(name, value, there)
        return cls(**given)


def refuse(name: str, given: Any, expected: str) -> NoReturn:
    """Raise CompileOptionError for one of an engine's options."""
    raise CompileOptionError(option=f"engine_options[{name!r}]", given=given, expected=expected)


def one_of(*allowed: str) -> Reader:
    """One of some words. An empty one is allowed where it is among them, and not named to users."""

    def read(given: Any) -> str:
        if not isinstance(given, str) or given not in allowed:
            raise ExpectedError("one of " + ", ".join(repr(word) for word in allowed if word))
        return given

    return read


def whole(least: int, expected: str = "", fits: Callable[[int], bool] = lambda value: True) -> Reader:
    """A whole number from ``least`` on. expected: in words; fits: what else must be true of it."""

    def read(given: Any) -> int:
        if isinstance(given, bool) or not isinstance(given, int) or given < least or not fits(given):
            raise ExpectedError(expected or f"a whole number from {least} on")
        return given

    return read


def text(expected: str) -> Reader:
    """Text that is not empty."""

    def read(given: Any) -> str:
        if not isinstance(given, str) or not given:
            raise ExpectedError(expected)
        return given

    return read
