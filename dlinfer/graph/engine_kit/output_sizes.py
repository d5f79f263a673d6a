"""The sizes of results as functions of a call's inputs: for engines whose results torch allocates.

A size is an integer or the text of an expression: plain data that can be stored. In it ``i0d1`` is the size of input 0
in dimension 1, and ``n2`` is the value of input 2, which is a number.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import SymInt, Tensor

from dlinfer.graph.torch_private.expressions import FUNCTIONS, SizeTextError, parse_size, to_size
from dlinfer.graph.torch_private.symbols import fixed_size, plain_symbol

SizeText = int | str

_PLACE = re.compile(r"i(\d+)d(\d+)|n(\d+)", re.ASCII)


class UnknownSizeError(Exception):
    """A size does not follow from the inputs."""


def input_size(index: int, dim: int) -> SizeText:
    """The size of an input, by its number."""
    return f"i{index}d{dim}"


def sizes_of(results: Sequence[Sequence[int | SymInt]], inputs: Sequence[Any]) -> list[list[SizeText]]:
    """The sizes of each result, from those of its fake and from the fakes of the inputs. Raises UnknownSizeError."""
    places: dict[Any, str] = {}
    for index, value in enumerate(inputs):
        if (symbol := plain_symbol(value)) is not None:
            places[symbol] = f"n{index}"
    for index, value in enumerate(inputs):
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if (symbol := plain_symbol(size)) is not None:
                places.setdefault(symbol, f"i{index}d{dim}")
    return [[_size(size, places) for size in result] for result in results]


def _size(size: int | SymInt, places: dict[Any, str]) -> SizeText:
    fixed = fixed_size(size)
    if fixed is not None:
        return fixed
    try:
        return str(to_size(size, places))
    except SizeTextError as cause:
        raise UnknownSizeError(f"{size} ({cause})") from cause


def reader(sizes: Sequence[Sequence[SizeText]]) -> Callable[[Sequence[Any]], tuple[tuple[int, ...], ...]]:
    """A function from a call's inputs to the sizes of its results. Raises ValueError for text that is no size."""
    rows = ["".join(f"{_text(size)}, " for size in row) for row in sizes]
    return eval(
        f"lambda inputs: ({''.join(f'({row}), ' for row in rows)})",
        {"__builtins__": {}, "min": min, "max": max, **FUNCTIONS},
    )


def _text(size: SizeText) -> str:
    """Python over ``inputs``, from text that was parsed."""
    try:
        parsed = parse_size(size)
    except SizeTextError as cause:
        raise ValueError(f"{size!r} is no size: {cause}") from cause
    places = {name: _PLACE.fullmatch(name) for name in parsed.symbols}
    if not all(places.values()):
        raise ValueError(f"{size!r} is no size of the inputs")
    return str(parsed.renamed({name: _place(*place.groups()) for name, place in places.items() if place}))


def _place(index: str, dim: str, number: str) -> str:
    return f"inputs[{number}]" if number else f"inputs[{index}].shape[{dim}]"
