"""Checks of a user's arguments before the library is called.

In each function ``call`` is the name of the API function, and ``argument`` the name of its argument, for the error."""

import operator
import os
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from dlinfer.vendor.megengine.errors import LiteArgumentError

Member = TypeVar("Member", bound=IntEnum)
Kind = TypeVar("Kind")


def wrong(call: str, argument: str, expected: str, actual: Any) -> LiteArgumentError:
    return LiteArgumentError(call=call, argument=argument, expected=expected, given=str(actual))


def member(call: str, argument: str, kind: type[Member], value: Any) -> Member:
    """Return the member of the enumeration ``kind`` for a member or a number. Raises LiteArgumentError."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(member.name for member in kind)
        raise wrong(call, argument, f"one of {names}", repr(value)) from None


def instance(call: str, argument: str, kind: type[Kind], value: Any) -> Kind:
    """Return ``value`` if it is an instance of the class ``kind``. Raises LiteArgumentError."""
    if not isinstance(value, kind):
        raise wrong(call, argument, f"a {kind.__name__}", repr(value))
    return value


def function(call: str, argument: str, value: Any) -> Callable[..., Any]:
    """Return ``value`` if it can be called. Raises LiteArgumentError."""
    if not callable(value):
        raise wrong(call, argument, "a function", repr(value))
    return value


def text(call: str, argument: str, value: Any) -> bytes:
    """Return a str as bytes in UTF-8. Raises LiteArgumentError for other values."""
    if not isinstance(value, str):
        raise wrong(call, argument, "a str", repr(value))
    return value.encode()


def whole(call: str, argument: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """Return a Python or numpy integer as an int. Raises LiteArgumentError unless it is from ``least`` to ``most``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise wrong(call, argument, f"a whole number from {least} to {most}", repr(value))
    return number


def existing(call: str, path: Any) -> bytes:
    """Return the absolute path of an existing file. Raises LiteArgumentError if there is no such file."""
    if not _path(call, path).is_file():
        raise wrong(call, "path", "a file", os.fspath(path))
    return os.fsencode(Path(path).absolute())


def writable(call: str, path: Any) -> bytes:
    """Return the path of a file to write. Raises LiteArgumentError if its folder is missing.

    The library itself would not report a missing folder."""
    if not _path(call, path).absolute().parent.is_dir():
        raise wrong(call, "path", "a file in an existing folder", os.fspath(path))
    return os.fsencode(path)


def folder(call: str, path: Any) -> bytes:
    """Return the path of a folder, and create the folder if it is missing. Raises LiteArgumentError."""
    try:
        _path(call, path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise wrong(call, "path", "a folder that can be created", error) from error
    return os.fsencode(path)


def _path(call: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise wrong(call, "path", "a path", repr(path))
    return Path(path)
