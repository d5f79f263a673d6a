"""The sizes of results as functions of a call's inputs, for engines whose results torch allocates.

A size is an integer or the text of an expression, so it can be stored. In an expression, ``i0d1`` is the size of input
0 in dimension 1, and ``n2`` is the number that is input 2.
"""

import re
from collections.abc import Callable, Sequence

from torch import SymInt, Tensor

from dlinfer.graph.torch_private.expressions import FUNCTIONS, Expression, SizeTextError, parse_size, to_size
from dlinfer.graph.torch_private.symbols import fixed_size, plain_symbol

SizeText = int | str

_PLACE = re.compile(r"i(\d+)d(\d+)|n(\d+)", re.ASCII)


class UnknownSizeError(Exception):
    """A result's size cannot be computed from the inputs' sizes and numbers."""


def input_size(index: int, dim: int) -> SizeText:
    return f"i{index}d{dim}"


def sizes_of(results: Sequence[Sequence[int | SymInt]], inputs: Sequence[object]) -> list[list[SizeText]]:
    """Return each result's sizes as integers or expressions. Raises UnknownSizeError.

    results: the shape of each result's fake. inputs: the fakes of the inputs.
    """
    places: dict[Expression, str] = {}
    for index, value in enumerate(inputs):
        if (symbol := plain_symbol(value)) is not None:
            places[symbol] = f"n{index}"
    for index, value in enumerate(inputs):
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if (symbol := plain_symbol(size)) is not None:
                places.setdefault(symbol, f"i{index}d{dim}")
    return [[_size(size, places) for size in result] for result in results]


def _size(size: int | SymInt, places: dict[Expression, str]) -> SizeText:
    fixed = fixed_size(size)
    if fixed is not None:
        return fixed
    try:
        return str(to_size(size, places))
    except SizeTextError as cause:
        raise UnknownSizeError(f"{size} ({cause})") from cause


def reader(sizes: Sequence[Sequence[SizeText]]) -> Callable[[Sequence[object]], tuple[tuple[int, ...], ...]]:
    """Return a function that computes the sizes of a call's results from the call's inputs.

    sizes: the result of ``sizes_of``. Raises ValueError for malformed text.
    """
    rows = ["".join(f"{_text(size)}, " for size in row) for row in sizes]
    return eval(
        f"lambda inputs: ({''.join(f'({row}), ' for row in rows)})",
        {"__builtins__": {}, "min": min, "max": max, **FUNCTIONS},
    )


def _text(size: SizeText) -> str:
    """Return Python code that computes a size from the variable ``inputs``. Raises ValueError for malformed text.

    The code comes from the parsed expression, never from the text itself.
    """
    try:
        parsed = parse_size(size)
    except SizeTextError as cause:
        raise ValueError(f"{size!r} is not a size: {cause}") from cause
    places = {name: _PLACE.fullmatch(name) for name in parsed.symbols}
    if not all(places.values()):
        raise ValueError(f"{size!r} is not a size of the inputs")
    return str(parsed.renamed({name: _place(*place.groups()) for name, place in places.items() if place}))


def _place(index: str, dim: str, number: str) -> str:
    return f"inputs[{number}]" if number else f"inputs[{index}].shape[{dim}]"
