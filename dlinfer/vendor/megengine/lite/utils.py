"""TensorBatchCollector: a batch tensor that is filled with samples."""

import ctypes
import threading
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dlinfer.vendor.megengine.lite.binding.checks import whole, wrong
from dlinfer.vendor.megengine.lite.binding.dtypes import lite_type
from dlinfer.vendor.megengine.lite.binding.enums import LiteDataType, LiteDeviceType
from dlinfer.vendor.megengine.lite.layout import LiteLayout, array_at
from dlinfer.vendor.megengine.lite.tensor import LiteTensor

_wrong = partial(wrong, "TensorBatchCollector")


class TensorBatchCollector:
    """A batch tensor that is filled sample by sample. Several threads may fill it.

    The batch has one place for each sample, numbered from 0.
    shape: the sizes of the whole batch.
    dtype, device_type, device_id, is_pinned_host: properties of the batch tensor. By default it is int8 on CUDA.
    tensor: an existing tensor to fill, of the sizes ``shape``. Its own properties replace the four above.
    Raises LiteArgumentError and LiteError."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any = LiteDataType.LITE_INT8,
        device_type: int = LiteDeviceType.LITE_CUDA,
        device_id: int = 0,
        is_pinned_host: bool = False,
        tensor: LiteTensor | None = None,
    ) -> None:
        sizes = LiteLayout(shape).shapes
        if not sizes or 0 in sizes:
            raise _wrong("shape", "at least one size, none of them 0", shape)
        if tensor is None:
            layout = LiteLayout(sizes, lite_type(dtype, "TensorBatchCollector"))
            tensor = LiteTensor(layout, device_type, device_id, is_pinned_host)
        elif tensor.layout.shapes != sizes:
            raise _wrong("tensor", f"a tensor of sizes {sizes}", tensor.layout)
        self._tensor = tensor
        self._sample = LiteLayout(sizes[1:], tensor.layout.dtype)
        self._count = sizes[0]
        self._lock = threading.Lock()
        self._free = list(range(self._count))

    def collect_id(self, array: np.ndarray | LiteTensor, batch_id: int) -> None:
        """Copy a sample to place ``batch_id`` of the batch. If the place is taken, warn and overwrite it."""
        self._check(array)
        batch_id = self._place("batch_id", batch_id)
        with self._lock:
            taken = batch_id not in self._free
            if not taken:
                self._free.remove(batch_id)
        if taken:
            warnings.warn(f"batch {batch_id} was not freed; its sample is overwritten", stacklevel=2)
        self._copy(array, batch_id)

    def collect(self, array: np.ndarray | LiteTensor) -> int:
        """Copy a sample to the first free place and return the number of the place.

        If no place is free, warn and return -1."""
        self._check(array)
        return self._collected(array)

    def collect_by_ctypes(self, data: ctypes.c_void_p, length: int) -> int:
        """Copy a sample of ``length`` bytes from an address to the first free place. Return the same as ``collect``."""
        if not isinstance(data, ctypes.c_void_p) or not data.value:
            raise _wrong("data", "a c_void_p with an address", data)
        if length != self._sample.nbytes:
            raise _wrong("length", f"{self._sample.nbytes} bytes, the size of a sample", length)
        return self._collected(array_at(data.value, self._sample))

    def free(self, indexes: Iterable[int]) -> None:
        """Mark places as free again, and warn about each place that was free already.

        indexes: the numbers of the places."""
        if not isinstance(indexes, Iterable):
            raise _wrong("indexes", "a list of place numbers", indexes)
        places = [self._place("indexes", index) for index in indexes]
        with self._lock:
            again = [place for place in places if place in self._free]
            self._free.extend(place for place in dict.fromkeys(places) if place not in self._free)
        for place in again:
            warnings.warn(f"batch {place} is already free", stacklevel=2)

    def get(self) -> LiteTensor:
        return self._tensor

    def to_numpy(self) -> np.ndarray:
        return self._tensor.to_numpy()

    def _place(self, argument: str, number: int) -> int:
        return whole("TensorBatchCollector", argument, number, 0, self._count - 1)

    def _collected(self, array: np.ndarray | LiteTensor) -> int:
        with self._lock:
            place = self._free.pop(0) if self._free else -1
        if place < 0:
            warnings.warn("all places are taken; free() one first", stacklevel=3)
        else:
            self._copy(array, place)
        return place

    def _check(self, array: Any) -> None:
        """Raise LiteArgumentError unless the sample ``array`` has the batch's dtype and the sizes of one sample."""
        if isinstance(array, LiteTensor):
            layout = array.layout
        elif isinstance(array, np.ndarray):
            layout = LiteLayout(array.shape, lite_type(array.dtype, "TensorBatchCollector"))
        else:
            raise _wrong("array", "an ndarray or a LiteTensor", type(array).__name__)
        if layout != self._sample:
            raise _wrong("array", f"a sample of {self._sample!r}", layout)

    def _copy(self, array: np.ndarray | LiteTensor, place: int) -> None:
        """Copy a sample to a place: an ndarray by set_data_by_copy, a LiteTensor by copy_from, as documented."""
        part = self._tensor.slice([place], [place + 1])
        part.reshape(self._sample.shapes or [1])
        if isinstance(array, LiteTensor):
            part.copy_from(array)
        elif part.device_type == LiteDeviceType.LITE_CPU or part.is_pinned_host:
            part.set_data_by_copy(array)
        else:
            staged = LiteTensor(part.layout, part.device_type, part.device_id, is_pinned_host=True)
            staged.set_data_by_copy(array)
            part.copy_from(staged)
