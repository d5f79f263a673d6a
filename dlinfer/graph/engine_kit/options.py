"""An engine's own options: a dataclass whose fields check their values.

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

Reader = Callable[[Any], object]
"""Takes a user's value and returns the field's value, which it accepts too. Raises ExpectedError."""

_Self = TypeVar("_Self", bound="EngineOptions")


class ExpectedError(Exception):
    """A field does not take a value; the text says which values it takes."""


def option(default: Any, read: Reader) -> Any:
    """A field of EngineOptions."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class EngineOptions:
    """No options. Making an object checks every field, and raises CompileOptionError for the first wrong one."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, item.metadata["read"](value))
            except ExpectedError as error:
                refuse(item.name, value, str(error))

    @classmethod
    def of(cls: type[_Self], options: Mapping[str, object]) -> _Self:
        """Options by name. Raises CompileOptionError; for an unknown name it lists the known names."""
        known = [item.name for item in fields(cls)]
        for name, value in options.items():
            if name not in known:
                there = (
                    f"one of the engine's options: {', '.join(known)}" if known else "none: it has no options"
                )
                refuse(name, value, there)
        return cls(**options)


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raise CompileOptionError for one of an engine's options."""
    raise CompileOptionError(option=f"engine_options[{name!r}]", given=value, expected=expected)


def one_of(*allowed: str) -> Reader:
    """One of some words. The empty word is allowed where it is among them; errors do not list it."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ExpectedError("one of " + ", ".join(repr(word) for word in allowed if word))
        return value

    return read


def whole(least: int, expected: str = "", fits: Callable[[int], bool] = lambda value: True) -> Reader:
    """A whole number from ``least`` on. expected: the same in words. fits: a further condition."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least or not fits(value):
            raise ExpectedError(expected or f"a whole number from {least} on")
        return value

    return read


def text(expected: str) -> Reader:
    """Text that is not empty."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ExpectedError(expected)
        return value

    return read
