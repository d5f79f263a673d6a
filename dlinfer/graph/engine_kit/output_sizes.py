"""The sizes of results, worked out from a call's inputs: for engines whose results torch allocates.

A size is a whole number, ``("size", input, dimension)``, ``("number", input)``, an operation on two sizes, such as
``("mul", size, size)``, or ``("trunc", number)`` of one in which floats occur: plain data that can be stored.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dlinfer.graph.torch_private.expressions import number_tree
from dlinfer.graph.torch_private.symbols import fixed_size, plain_symbol

Size = Any
"""An int or a nested tuple or list as described above."""

_INFIX = {"add": "+", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**"}
_CALLED = ("min", "max")


class UnknownSizeError(Exception):
    """A size does not follow from the inputs."""


def sizes_of(results: Sequence[Sequence[Any]], inputs: Sequence[Any]) -> list[list[Size]]:
    """The sizes of each result, given them as fakes have them, and the fakes of the inputs. Raises UnknownSizeError."""
    places: dict[Any, Size] = {}
    for index, value in enumerate(inputs):
        if (symbol := plain_symbol(value)) is not None:
            places[symbol] = ("number", index)
    for index, value in enumerate(inputs):
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if (symbol := plain_symbol(size)) is not None:
                places.setdefault(symbol, ("size", index, dim))
    return [[_size(size, places) for size in result] for result in results]


def _size(size: Any, places: dict[Any, Size]) -> Size:
    fixed = fixed_size(size)
    if fixed is not None:
        return fixed
    try:
        return number_tree(size, places)
    except (KeyError, AttributeError) as cause:
        raise UnknownSizeError(f"{size} ({cause})") from cause


def reader(sizes: Sequence[Sequence[Size]]) -> Callable[[Sequence[Any]], tuple[tuple[int, ...], ...]]:
    """A function from a call's inputs to the sizes of its results. Raises ValueError for what is no size."""
    rows = ["".join(f"{_text(size)}, " for size in row) for row in sizes]
    text = f"lambda inputs: ({''.join(f'({row}), ' for row in rows)})"
    scope: dict[str, Any] = {"__builtins__": {}, "min": min, "max": max, "trunc": math.trunc}
    return eval(text, scope)  # text written here, of numbers and the operations above alone


def _text(size: Size, cut: bool = False) -> str:
    """A size as Python. cut: it is cut to a whole number, so that floats may occur in it."""
    if type(size) is int or (cut and type(size) is float and math.isfinite(size)):
        return repr(size)
    if not isinstance(size, (tuple, list)) or not size:
        raise ValueError(f"{size!r} is no size")
    kind, *parts = size
    if kind in ("size", "number") and all(type(part) is int for part in parts):
        if kind == "size" and len(parts) == 2:
            return f"inputs[{parts[0]}].shape[{parts[1]}]"
        if kind == "number" and len(parts) == 1:
            return f"inputs[{parts[0]}]"
    if len(parts) == 2 and kind in _INFIX:
        return f"({_text(parts[0], cut)} {_INFIX[kind]} {_text(parts[1], cut)})"
    if len(parts) == 2 and kind in _CALLED:
        return f"{kind}({_text(parts[0], cut)}, {_text(parts[1], cut)})"
    if len(parts) == 1 and kind == "trunc":
        return f"trunc({_text(parts[0], True)})"
    raise ValueError(f"{size!r} is no size")
