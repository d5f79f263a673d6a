"""The three forms of the constructor ``EngineLLM(...)``."""

import os
from collections.abc import Sequence
from typing import Any

from dlinfer.vendor.sophgo.runtime.loaded import LoadedModel
from dlinfer.vendor.sophgo.sail.checks import is_count, is_list, made_by, refuse

_MOST_FLAGS = 2**32 - 1


def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoadedModel:
    """Load the bmodel that the arguments of ``EngineLLM(...)`` name. Raises SophgoCallError if they match no form."""
    first = args[0] if args else kwargs.get("bmodel_path", kwargs.get("bmodel_bytes"))
    if isinstance(first, (bytes, bytearray)):
        form = _from_bytes
    elif isinstance(first, (str, os.PathLike)):
        form = _with_flags if len(args) + len(kwargs) == 3 else _from_file
    else:
        raise refuse("EngineLLM", f"{type(first).__name__} is neither a path nor the bytes of a bmodel")
    source, flags, dev_ids = made_by(
        form, args, kwargs, "EngineLLM", "the arguments match none of its three forms"
    )
    if not is_list(dev_ids):
        raise refuse("EngineLLM", f"dev_ids {dev_ids!r} is not a list of device numbers")
    return LoadedModel(source, list(dev_ids), flags)


_Form = tuple[Any, int | None, Sequence[int]]
"""The bmodel's path or bytes, BMRuntime's flags (None leaves its own), and the numbers of the devices."""


def _from_file(bmodel_path: str, dev_ids: Sequence[int]) -> _Form:
    return bmodel_path, None, dev_ids


def _from_bytes(bmodel_bytes: bytes, bmodel_size: int, dev_ids: Sequence[int]) -> _Form:
    if not is_count(bmodel_size) or bmodel_size != len(bmodel_bytes):
        raise refuse("EngineLLM", f"bmodel_size is {bmodel_size!r}, but there are {len(bmodel_bytes)} bytes")
    return bytes(bmodel_bytes), None, dev_ids


def _with_flags(bmodel_path: str, flags: int, dev_ids: Sequence[int]) -> _Form:
    if not is_count(flags) or flags > _MOST_FLAGS:
        raise refuse("EngineLLM", f"flags {flags!r} are not bits of sail.BmrtFlag")
    return bmodel_path, int(flags), dev_ids
