"""Kinds of arguments that many calls take, judged before the library is called."""

from enum import IntEnum
from typing import Any, TypeVar

from dlinfer.vendor.megengine.errors import LiteArgumentError

Member = TypeVar("Member", bound=IntEnum)


def member(call: str, argument: str, kind: type[Member], value: Any) -> Member:
    """A member of an enumeration, by itself or its number. Raises LiteArgumentError."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(one.name for one in kind)
        raise LiteArgumentError(
            call=call, argument=argument, expected=f"one of {names}", given=repr(value)
        ) from None


def text(call: str, argument: str, value: Any) -> bytes:
    """A str as the library takes it. Raises LiteArgumentError."""
    if not isinstance(value, str):
        raise LiteArgumentError(call=call, argument=argument, expected="a str", given=repr(value))
    return value.encode()


def whole(call: str, argument: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """A whole number of a range. Raises LiteArgumentError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise LiteArgumentError(
            call=call, argument=argument, expected=f"a whole number from {least} to {most}", given=repr(value)
        )
    return value
