"""Write and read the arguments of a graph's calls as JSON.

An argument is a plain value, a container, a dtype, a device, or the name of an earlier result.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import fx

from dlinfer.errors import DlinferError
from dlinfer.graph.ir.program import Constant, Value

Json = Any
"""Parsed JSON of unchecked structure."""

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}", re.ASCII)
_TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)


class CodecError(ValueError):
    """A graph or program has no written form, or data does not describe one. The error's text says what is wrong."""


@contextmanager
def refuse_malformed() -> Generator[None]:
    """Raise CodecError in place of an error that malformed data causes in the ``with`` block, such as KeyError.

    dlinfer's own errors pass unchanged.
    """
    try:
        yield
    except (CodecError, DlinferError):
        raise
    except _MALFORMED as cause:
        raise CodecError(first_line(cause)) from cause


def first_line(cause: Exception) -> str:
    """Return the first line of an error's text, such as ``KeyError: 'name'``. For a ValueError the class is omitted."""
    text = (str(cause).strip().splitlines() or [""])[0][:300]
    return text if text and isinstance(cause, ValueError) else f"{type(cause).__name__}: {text}"


def encode(value: object) -> Json:
    """Return an argument as JSON. Raises CodecError for a type without a written form."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (fx.Node, Value)):
        return {"node": value.name}
    if isinstance(value, Constant):
        return {"constant": value.name}
    if isinstance(value, (tuple, list)):
        items = [encode(item) for item in cast("Sequence[object]", value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, slice):
        parts = cast("slice[object, object, object]", value)
        return {"slice": [encode(item) for item in (parts.start, parts.stop, parts.step)]}
    if isinstance(value, _TORCH_NAMES):
        return {"torch": short_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise CodecError(f"an argument of type {type(value).__name__} cannot be stored")


def decode(data: Json, references: Mapping[str, Callable[[str], object]]) -> Any:
    """Return the argument that ``encode`` wrote.

    references: two functions, under the keys ``node`` and ``constant``. Each takes a name and returns the node or
        constant with this name. If a key is missing, an argument that names a node or constant of this kind is refused.
    Raises CodecError for other data. An error that a function of ``references`` raises passes unchanged.
    """
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if is_list(data):
        return [decode(item, references) for item in data]
    if not _is_dict(data) or len(data) != 1:
        raise CodecError("an argument has an unknown form")
    ((kind, content),) = data.items()
    if kind in references and isinstance(content, str):
        return references[kind](content)
    if kind == "tuple" and is_list(content):
        return tuple(decode(item, references) for item in content)
    if kind == "slice" and is_list(content) and len(content) == 3:
        return slice(*(decode(item, references) for item in content))
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == "torch":
        return _torch_object(content, *_TORCH_NAMES)
    if kind == "device":
        return device_of(content)
    raise CodecError(f"an argument has the unknown kind {kind[:40]!r}")


def is_list(data: Json) -> TypeGuard[list[Json]]:
    return isinstance(data, list)


def _is_dict(data: Json) -> TypeGuard[dict[str, Json]]:
    return isinstance(data, dict)


def short_name(value: object) -> str:
    """Return the name of a dtype, layout or memory format of torch, such as ``float32``."""
    return str(value).removeprefix("torch.")


def name_of(value: Json) -> str:
    """Return a node's name unchanged. Raises CodecError unless generated code can use it as a variable's name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise CodecError(f"{value!r} is not a valid name of a node")
    return value


def dtype_of(content: Json) -> torch.dtype:
    """Return the dtype that ``content`` names, such as ``float32``. Raises CodecError if there is none."""
    return _torch_object(content, torch.dtype)


def device_of(content: Json) -> torch.device:
    """Return the device that ``content`` names, such as ``cuda:0``. Raises CodecError if there is none."""
    try:
        return torch.device(content if isinstance(content, str) else "")
    except RuntimeError:
        raise CodecError(f"{str(content)[:40]!r} is not a device") from None


def _torch_object(content: Json, *kinds: type[T]) -> T:
    value = getattr(torch, content, None) if isinstance(content, str) and _NAME.fullmatch(content) else None
    if not isinstance(value, kinds):
        raise CodecError(f"{str(content)[:40]!r} is not a {' or '.join(kind.__name__ for kind in kinds)}")
    return value
