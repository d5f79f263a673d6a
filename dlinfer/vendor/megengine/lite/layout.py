"""LiteLayout: a tensor's sizes and element type."""

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np

from dlinfer.vendor.megengine.lite.binding.checks import wrong
from dlinfer.vendor.megengine.lite.binding.dtypes import lite_type, numpy_type

_PLACES = 7
_MOST_DIMENSIONS = 6
"""The greatest number of dimensions that the library takes. The C structure has room for one more."""


class LiteLayout(ctypes.Structure):
    """A tensor's sizes and element type. It is a C structure, passed by value.

    shape: up to 6 sizes; None for an unknown layout. dtype: anything that ``lite_type`` takes; float32 by default.
    Readable are ``shapes`` (a list), ``ndim``, ``data_type`` (the LiteDataType's number) and ``dtype`` (the numpy
    type). Writable are ``shapes`` and ``data_type``. A wrong value raises LiteArgumentError."""

    _fields_ = [
        ("_shapes", ctypes.c_size_t * _PLACES),
        ("ndim", ctypes.c_size_t),
        ("data_type", ctypes.c_int),
    ]

    def __init__(self, shape: Iterable[int] | None = None, dtype: Any = None) -> None:
        super().__init__()
        self.shapes = () if shape is None else shape
        self.data_type = int(lite_type(dtype, "LiteLayout"))

    @property
    def shapes(self) -> list[int]:
        return list(self._shapes)[: self.ndim]

    @shapes.setter
    def shapes(self, shape: Iterable[int]) -> None:
        sizes: list[Any] = list(shape) if isinstance(shape, Iterable) else [None]
        whole = all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes)
        if len(sizes) > _MOST_DIMENSIONS or not whole:
            raise wrong("LiteLayout", "shape", f"up to {_MOST_DIMENSIONS} sizes of at least 0", repr(shape))
        self._shapes = (ctypes.c_size_t * _PLACES)(*map(int, sizes))
        self.ndim = len(sizes)

    @property
    def dtype(self) -> type[np.generic]:
        return numpy_type(self.data_type)

    @property
    def nbytes(self) -> int:
        """The size in bytes of a contiguous tensor with this layout; 0 for an unknown layout."""
        count = int(np.prod(self.shapes, dtype=np.int64)) if self.ndim else 0
        return count * np.dtype(self.dtype).itemsize

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LiteLayout):
            return NotImplemented
        return (self.shapes, self.data_type) == (other.shapes, other.data_type)

    def __hash__(self) -> int:
        return hash((*self.shapes, self.data_type))

    def __repr__(self) -> str:
        return f"LiteLayout({self.shapes}, {np.dtype(self.dtype).name!r})"


def array_at(address: int, layout: LiteLayout, holds: Any = None) -> np.ndarray:
    """Return the memory at an address as an array, without a copy.

    layout: the array's layout, with at least 1 byte. holds: an object that the array keeps alive."""
    memory = (ctypes.c_ubyte * layout.nbytes).from_address(address)
    vars(memory)["holds"] = holds  # the array keeps the ctypes object alive
    return np.frombuffer(memoryview(memory), layout.dtype).reshape(layout.shapes)


def copied(layout: LiteLayout) -> LiteLayout:
    """Return a copy of a layout that a caller passed, since the caller may change the layout later."""
    return LiteLayout(layout.shapes, numpy_type(layout.data_type))
