"""Kinds of arguments that many calls take, judged before the library is called."""

import operator
import os
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from dlinfer.vendor.megengine.errors import LiteArgumentError

Member = TypeVar("Member", bound=IntEnum)
Kind = TypeVar("Kind")


def wrong(call: str, argument: str, expected: str, given: Any) -> LiteArgumentError:
    """Return the error of an argument that a call does not take."""
    return LiteArgumentError(call=call, argument=argument, expected=expected, given=str(given))


def member(call: str, argument: str, kind: type[Member], value: Any) -> Member:
    """Return a member of an enumeration, by itself or its number. Raises LiteArgumentError."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(one.name for one in kind)
        raise wrong(call, argument, f"one of {names}", repr(value)) from None


def instance(call: str, argument: str, kind: type[Kind], value: Any) -> Kind:
    """Return an object of a class. Raises LiteArgumentError."""
    if not isinstance(value, kind):
        raise wrong(call, argument, f"a {kind.__name__}", repr(value))
    return value


def function(call: str, argument: str, value: Any) -> Callable[..., Any]:
    """Return a function. Raises LiteArgumentError."""
    if not callable(value):
        raise wrong(call, argument, "a function", repr(value))
    return value


def text(call: str, argument: str, value: Any) -> bytes:
    """Return a str as the library takes it. Raises LiteArgumentError."""
    if not isinstance(value, str):
        raise wrong(call, argument, "a str", repr(value))
    return value.encode()


def whole(call: str, argument: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """Return a whole number of a range, Python's or numpy's. Raises LiteArgumentError."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise wrong(call, argument, f"a whole number from {least} to {most}", repr(value))
    return number


def existing(call: str, path: Any) -> bytes:
    """Return the absolute path of a file that is there. Raises LiteArgumentError."""
    if not _path(call, path).is_file():
        raise wrong(call, "path", "a file", os.fspath(path))
    return os.fsencode(Path(path).absolute())


def writable(call: str, path: Any) -> bytes:
    """Return the path of a file in a folder that is there, without which the library would write nowhere in silence.

    Raises LiteArgumentError.
    """
    if not _path(call, path).absolute().parent.is_dir():
        raise wrong(call, "path", "a file in a folder that is there", os.fspath(path))
    return os.fsencode(path)


def folder(call: str, path: Any) -> bytes:
    """Return the path of a folder, which is made where it is not there. Raises LiteArgumentError."""
    try:
        _path(call, path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise wrong(call, "path", "a folder that can be made", error) from error
    return os.fsencode(path)


def _path(call: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise wrong(call, "path", "a path", repr(path))
    return Path(path)
