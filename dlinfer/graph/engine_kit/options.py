"""An engine's own options: a dataclass whose fields check their values.

::

    @dataclass(frozen=True)
    class MyOptions(EngineOptions):
        precision: str = option("model", one_of("model", "f16"))
        num_threads: int = option(0, whole(0, "a number of threads, 0 or more"))

Users set them with ``options={"engine_options": {...}}`` or in DLINFER_ENGINE_OPTIONS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from dlinfer.errors import CompileOptionError

Reader = Callable[[Any], object]
"""Checks a user's value and returns the field's value. Given the field's value, it returns that value again.

Raises ExpectedError for a value that is not allowed."""

_Self = TypeVar("_Self", bound="EngineOptions")


class ExpectedError(Exception):
    """A field does not allow the given value. The text of the error describes the allowed values."""


def option(default: Any, read: Reader) -> Any:
    """Return a dataclass field for EngineOptions. read: checks and converts the user's value."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class EngineOptions:
    """The base class of an engine's options; it has no options itself.

    Making an object checks every field, and raises CompileOptionError for the first wrong value.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, item.metadata["read"](value))
            except ExpectedError as error:
                refuse(item.name, value, str(error))

    @classmethod
    def of(cls: type[_Self], options: Mapping[str, object]) -> _Self:
        """Make the options from names and values.

        Raises CompileOptionError for a wrong value or an unknown name. For an unknown name the error lists the known
        names.
        """
        known = [item.name for item in fields(cls)]
        for name, value in options.items():
            if name not in known:
                there = (
                    f"one of the engine's options: {', '.join(known)}" if known else "none: it has no options"
                )
                refuse(name, value, there)
        return cls(**options)


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raise CompileOptionError for an engine's option. expected: describes the allowed values."""
    raise CompileOptionError(option=f"engine_options[{name!r}]", given=value, expected=expected)


def one_of(*allowed: str) -> Reader:
    """Return a reader that takes only the ``allowed`` words. Its errors list them without the empty word."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ExpectedError("one of " + ", ".join(repr(word) for word in allowed if word))
        return value

    return read


def whole(least: int, expected: str = "", fits: Callable[[int], bool] = lambda value: True) -> Reader:
    """Return a reader that takes integers, ``least`` or more.

    expected: how errors describe the allowed values. fits: a further condition on the integer.
    """

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least or not fits(value):
            raise ExpectedError(expected or f"a whole number from {least} on")
        return value

    return read


def text(expected: str) -> Reader:
    """Return a reader that takes strings, except the empty one. expected: how errors describe the allowed values."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ExpectedError(expected)
        return value

    return read
