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
"""A function that checks a user's value and returns the field's value.

It also accepts each value that it may return. It raises ExpectedError for a value that is not allowed."""

_Self = TypeVar("_Self", bound="EngineOptions")


class ExpectedError(Exception):
    """The value is not allowed. The error's text describes the allowed values."""


def option(default: object, read: Reader) -> Any:
    """Return a dataclass field for EngineOptions. read: a function that checks and converts the user's value."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class EngineOptions:
    """The base class of an engine's options; it has no options itself.

    Creating an object checks every field, and raises CompileOptionError for the first wrong value.
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
        """Return the options object for a dict of names and values.

        Raises CompileOptionError for a wrong value or an unknown name.
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
    """Return a reader that accepts only the ``allowed`` words. Its errors list these words, except the empty string."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ExpectedError("one of " + ", ".join(repr(word) for word in allowed if word))
        return value

    return read


def whole(least: int, expected: str = "", fits: Callable[[int], bool] = lambda value: True) -> Reader:
    """Return a reader that accepts an integer if it is at least ``least`` and ``fits`` returns True for it.

    expected: the description of the allowed values in errors.
    """

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least or not fits(value):
            raise ExpectedError(expected or f"a whole number of at least {least}")
        return value

    return read


def text(expected: str) -> Reader:
    """Return a reader that accepts every string except the empty one.

    expected: the description of the allowed values in errors.
    """

    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ExpectedError(expected)
        return value

    return read
