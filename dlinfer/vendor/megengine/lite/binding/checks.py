"""Kinds of arguments that many calls take, judged before the library is called."""

import operator
import os
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from dlinfer.vendor.megengine.errors import LiteArgumentError

Member = TypeVar("Member", bound=IntEnum)
Kind = TypeVar("Kind")


def member(call: str, argument: str, kind: type[Member], value: Any) -> Member:
    """Return a member of an enumeration, by itself or its number. Raises LiteArgumentError."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(one.name for one in kind)
        raise LiteArgumentError(
            call=call, argument=argument, expected=f"one of {names}", given=repr(value)
        ) from None


def instance(call: str, argument: str, kind: type[Kind], value: Any) -> Kind:
    """Return an object of a class. Raises LiteArgumentError."""
    if not isinstance(value, kind):
        raise LiteArgumentError(
            call=call, argument=argument, expected=f"a {kind.__name__}", given=repr(value)
        )
    return value


def text(call: str, argument: str, value: Any) -> bytes:
    """Return a str as the library takes it. Raises LiteArgumentError."""
    if not isinstance(value, str):
        raise LiteArgumentError(call=call, argument=argument, expected="a str", given=repr(value))
    return value.encode()


def whole(call: str, argument: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """Return a whole number of a range, Python's or numpy's. Raises LiteArgumentError."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise LiteArgumentError(
            call=call, argument=argument, expected=f"a whole number from {least} to {most}", given=repr(value)
        )
    return number


def existing(call: str, path: Any) -> bytes:
    """Return the absolute path of a file that is there. Raises LiteArgumentError."""
    if not _path(call, path).is_file():
        raise LiteArgumentError(call=call, argument="path", expected="a file", given=os.fspath(path))
    return os.fsencode(Path(path).absolute())


def writable(call: str, path: Any) -> bytes:
    """Return the path of a file in a folder that is there, without which the library would write nowhere in silence.

    Raises LiteArgumentError.
    """
    if not _path(call, path).absolute().parent.is_dir():
        raise LiteArgumentError(
            call=call, argument="path", expected="a file in a folder that is there", given=os.fspath(path)
        )
    return os.fsencode(path)


def folder(call: str, path: Any) -> bytes:
    """Return the path of a folder, which is made where it is not there. Raises LiteArgumentError."""
    try:
        _path(call, path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LiteArgumentError(
            call=call, argument="path", expected="a folder that can be made", given=str(error)
        ) from error
    return os.fsencode(path)


def _path(call: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise LiteArgumentError(call=call, argument="path", expected="a path", given=repr(path))
    return Path(path)
