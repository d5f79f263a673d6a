"""LiteTensor: memory on a device, with sizes and an element type."""

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlinfer.vendor.megengine.lite.binding import devices
from dlinfer.vendor.megengine.lite.binding.checks import instance, whole, wrong
from dlinfer.vendor.megengine.lite.binding.dtypes import for_copying, for_sharing, from_list, lite_type
from dlinfer.vendor.megengine.lite.binding.enums import LiteDeviceType
from dlinfer.vendor.megengine.lite.binding.library import library
from dlinfer.vendor.megengine.lite.layout import LiteLayout, array_at, copied


class _Description(ctypes.Structure):
    _fields_ = [
        ("is_pinned_host", ctypes.c_int),
        ("layout", LiteLayout),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
    ]


@dataclass
class Kept:
    """Keeps alive the object whose memory a tensor uses.

    data: the object, such as an ndarray; None if there is none."""

    data: Any = None


class LiteTensor:
    """A tensor. The library allocates its memory at the first use.

    layout: its sizes and element type; ``shapes`` and ``dtype`` may be passed instead.
    device_type, device_id: its device.
    is_pinned_host: whether its memory is page-locked host memory, which a device can read.
    Raises LiteArgumentError for a bad argument, and LiteError for a device that this machine lacks."""

    def __init__(
        self,
        layout: LiteLayout | None = None,
        device_type: int = LiteDeviceType.LITE_CPU,
        device_id: int = 0,
        is_pinned_host: bool = False,
        shapes: Sequence[int] | None = None,
        dtype: Any = None,
    ) -> None:
        native = devices.usable("LiteTensor", device_type)
        if layout is None:
            layout = LiteLayout(shapes, dtype)
        layout = copied(instance("LiteTensor", "layout", LiteLayout, layout))
        handle = ctypes.c_void_p()
        number = whole("LiteTensor", "device_id", device_id)
        description = _Description(bool(is_pinned_host), layout, native, number)
        library().call("make_tensor", description, ctypes.byref(handle), said="LiteTensor")
        self._adopt(handle, Kept(), owned=True)

    @classmethod
    def _of(cls, handle: ctypes.c_void_p, kept: Kept, *, owned: bool) -> "LiteTensor":
        """Wrap a tensor that the library created. owned: whether the library's tensor is destroyed with this object.

        kept: keeps alive the memory that the tensor uses."""
        tensor = cls.__new__(cls)
        tensor._adopt(handle, kept, owned=owned)
        return tensor

    def _adopt(self, handle: ctypes.c_void_p, kept: Kept, *, owned: bool) -> None:
        self._handle = handle
        self._kept = kept
        self.network: Any = None  # kept alive as long as a tensor of it
        self._fixed_type = not owned  # a network's tensors keep the type that the model has
        if owned:
            weakref.finalize(self, library().call, "destroy_tensor", handle)
        self.update()

    # --- properties

    @property
    def layout(self) -> LiteLayout:
        """A copy of the tensor's layout. To change the tensor's layout, assign a LiteLayout or a list of sizes."""
        layout = LiteLayout()
        library().call("get_tensor_layout", self._handle, ctypes.byref(layout))
        return layout

    @layout.setter
    def layout(self, layout: LiteLayout | Sequence[int]) -> None:
        if not isinstance(layout, LiteLayout):
            layout = LiteLayout(layout, self.layout.dtype)
        self._set_layout("layout", layout)

    def _set_layout(self, call: str, layout: LiteLayout) -> None:
        now = self.layout
        if self._fixed_type and now.data_type != layout.data_type:
            expected = f"{np.dtype(now.dtype)}, the model's dtype"
            raise wrong(call, "dtype", expected, np.dtype(layout.dtype))
        library().call("set_tensor_layout", self._handle, copied(layout), said=call)
        self.update()

    @property
    def is_pinned_host(self) -> bool:
        """Whether the tensor's memory is page-locked host memory."""
        return bool(library().ask("is_pinned_host", self._handle))

    @property
    def device_type(self) -> LiteDeviceType:
        return devices.documented(library().ask("get_tensor_device_type", self._handle))

    @property
    def device_id(self) -> int:
        """Number of the tensor's device among the devices of its type."""
        return library().ask("get_tensor_device_id", self._handle)

    @property
    def is_continue(self) -> bool:
        """Whether the tensor's memory is contiguous."""
        return bool(library().ask("is_memory_continue", self._handle))

    @property
    def nbytes(self) -> int:
        return library().ask("get_tensor_total_size_in_byte", self._handle)

    def update(self) -> None:
        """Check that the library accepts the tensor.

        There is nothing to update: each property asks the library anew."""
        library().call("get_tensor_layout", self._handle, ctypes.byref(LiteLayout()))

    def __repr__(self) -> str:
        place = f"{self.device_type.name}, {self.device_id}"
        return f"LiteTensor({self.layout!r}, {place}, is_pinned_host={self.is_pinned_host})"

    def get_ctypes_memory(self) -> ctypes.c_void_p:
        """Return the address of the tensor's memory, and allocate the memory if it is missing."""
        return ctypes.c_void_p(library().ask("get_tensor_memory", self._handle, said="get_ctypes_memory"))

    # --- changes

    def reshape(self, shape: Sequence[int]) -> None:
        """Change the sizes but keep the elements.

        Raises LiteArgumentError unless ``shape`` has the same number of elements."""
        sizes = LiteLayout(shape).shapes
        now = self.layout.shapes
        if np.prod(sizes, dtype=np.int64) != np.prod(now, dtype=np.int64):
            raise wrong("reshape", "shape", f"as many elements as {now}", sizes)
        numbers = (ctypes.c_int * len(sizes))(*sizes)
        library().call("tensor_reshape", self._handle, numbers, len(sizes), said="reshape")

    def slice(
        self, start: Sequence[int], end: Sequence[int], step: Sequence[int] | None = None
    ) -> "LiteTensor":
        """Return a view of a part of the tensor. The view may be non-contiguous.

        start, end, step: one number for each of the first ``len(start)`` dimensions. ``step`` None means steps of 1.
        Raises LiteArgumentError for a part out of bounds."""
        first, last = _numbers("slice", "start", start), _numbers("slice", "end", end)
        every = [1] * len(first) if step is None else _numbers("slice", "step", step)
        sizes = self.layout.shapes
        if not len(first) == len(last) == len(every) <= len(sizes):
            expected = f"sequences of equal length, at most {len(sizes)}"
            raise wrong("slice", "start, end, step", expected, (start, end, step))
        for axis, (low, high, jump) in enumerate(zip(first, last, every, strict=True)):
            if not (0 <= low < high <= sizes[axis] and jump >= 1):
                expected = f"0 <= start < end <= {sizes[axis]} and step >= 1 in dimension {axis}"
                raise wrong("slice", "start, end, step", expected, (low, high, jump))
        numbers = [(ctypes.c_size_t * len(first))(*bounds) for bounds in (first, last, every)]
        view = library().ask("tensor_slice", self._handle, *numbers, len(first), said="slice")
        part = LiteTensor._of(ctypes.c_void_p(view), Kept(self._kept.data), owned=True)
        part._fixed_type = True  # its memory is another tensor's
        return part

    def fill_zero(self) -> None:
        library().call("tensor_fill_zero", self._handle, said="fill_zero")

    def copy_from(self, src_tensor: "LiteTensor") -> None:
        """Copy ``src_tensor``'s elements into this tensor.

        If the two layouts differ, this tensor takes ``src_tensor``'s."""
        instance("copy_from", "src_tensor", LiteTensor, src_tensor)
        source = src_tensor.layout
        if source != self.layout:
            if not self.is_continue:
                raise wrong("copy_from", "src_tensor", f"{self.layout} for a part of a tensor", source)
            self._set_layout("copy_from", source)
        library().call("tensor_copy", self._handle, src_tensor._handle, said="copy_from")

    def share_memory_with(self, src_tensor: "LiteTensor") -> None:
        """Use ``src_tensor``'s memory, and take its layout and device."""
        instance("share_memory_with", "src_tensor", LiteTensor, src_tensor)
        if self._fixed_type and src_tensor.layout.data_type != self.layout.data_type:
            raise wrong("share_memory_with", "src_tensor", f"dtype of {self.layout}", src_tensor.layout)
        library().call("tensor_share_memory_with", self._handle, src_tensor._handle, said="share_memory_with")
        self._kept.data = src_tensor._kept.data

    # --- data in

    def set_data_by_copy(self, data: Any, data_length: int = 0, layout: LiteLayout | None = None) -> None:
        """Copy data into the tensor, which must be on the CPU or page-locked.

        data: a list, an ndarray or a c_void_p. A list's numbers replace the tensor's first elements. An ndarray is
            copied whole; if its size in bytes differs from the tensor's, the tensor takes the ndarray's layout. From
            the address in a c_void_p, as many bytes are copied as the tensor has.
        data_length: read only for a c_void_p. It must equal the tensor's size in bytes. With ``layout`` it may be 0.
        layout: the tensor's new layout; None keeps the old one, except for an ndarray of another size.
        Raises LiteArgumentError. The module ``dtypes`` lists the conversions."""
        call = "set_data_by_copy"
        self._for_host(call)
        if layout is not None:
            instance(call, "layout", LiteLayout, layout)
        if isinstance(data, list):
            target = self.layout if layout is None else layout
            values = from_list(data, np.dtype(target.dtype), call).ravel()
            if values.nbytes > target.nbytes:
                expected = f"at most {target.nbytes // values.itemsize} numbers"
                raise wrong(call, "data", expected, f"{values.size}")
            if layout is not None:
                self._set_layout(call, layout)
            self._write(values.ctypes.data, values.nbytes)
        elif isinstance(data, np.ndarray):
            values = for_copying(data, call)
            self._fit(call, values, layout)
            self._write(values.ctypes.data, values.nbytes)
        else:
            address = self._address(call, data, data_length, layout)
            self._write(address, self.nbytes)

    def set_data_by_share(self, data: Any, length: int = 0, layout: LiteLayout | None = None) -> None:
        """Use the caller's memory without a copy.

        data: a contiguous ndarray, or a c_void_p. An ndarray needs a tensor that is on the CPU or page-locked, and is
            kept alive. The memory at a c_void_p must be on the tensor's device and exist as long as the tensor uses it.
        length: read only for a c_void_p. It must equal the tensor's size in bytes. With ``layout`` it may be 0.
        layout: the tensor's new layout; None keeps the old one, except for an ndarray of another size.
        Raises LiteArgumentError."""
        call = "set_data_by_share"
        if layout is not None:
            instance(call, "layout", LiteLayout, layout)
        if isinstance(data, np.ndarray):
            self._for_host(call)
            values = for_sharing(data, call)
            if not values.size:
                raise wrong(call, "data", "at least one element", "none")
            self._fit(call, values, layout)
            address = values.ctypes.data
        else:
            address = self._address(call, data, length, layout)
        library().call("reset_tensor_memory", self._handle, address, self.nbytes, said=call)
        self._kept.data = data

    def _fit(self, call: str, values: np.ndarray, layout: LiteLayout | None) -> None:
        """Set the tensor's layout so that the tensor can take the array ``values``.

        layout: the new layout. None keeps the tensor's layout if the array has as many bytes as the tensor, and sets
            the array's layout otherwise.
        Raises LiteArgumentError if ``layout`` has another dtype or size in bytes than the array.
        Raises LiteArgumentError if the tensor keeps its layout and has another dtype than the array."""
        if layout is not None:
            if layout.nbytes != values.nbytes or layout.dtype != values.dtype.type:
                raise wrong(call, "layout", f"one of {values.dtype} {values.shape}", layout)
            self._set_layout(call, layout)
            return
        now = self.layout
        if now.ndim == 0 or self.nbytes != values.nbytes:
            self._set_layout(call, LiteLayout(values.shape, lite_type(values.dtype, call)))
        elif values.dtype != now.dtype:
            # As many bytes of another type: the library would reinterpret the bits.
            raise wrong(call, "data", f"the tensor's dtype {np.dtype(now.dtype)}", values.dtype)

    def _address(self, call: str, data: Any, length: int, layout: LiteLayout | None) -> int:
        if not isinstance(data, ctypes.c_void_p):
            raise wrong(call, "data", "a list, an ndarray or a c_void_p", type(data).__name__)
        if not data.value:
            raise wrong(call, "data", "an address", "a null pointer")
        size = self.nbytes if layout is None else layout.nbytes
        if (length or layout is None) and length != size:
            raise wrong(call, "length", f"{size}, the tensor's size in bytes, or a new layout", length)
        if layout is not None:
            self._set_layout(call, layout)
        return data.value

    def _for_host(self, call: str) -> None:
        if not (self.is_pinned_host or self.device_type == LiteDeviceType.LITE_CPU):
            raise wrong(
                call, "the tensor", "a tensor on the CPU, or a page-locked one", self.device_type.name
            )
        if not self.is_continue:
            raise wrong(call, "the tensor", "a contiguous tensor", "a part of another tensor")

    def _write(self, address: int, size: int) -> None:
        if size:
            ctypes.memmove(self.get_ctypes_memory(), address, size)

    # --- data out

    def get_data_by_share(self) -> np.ndarray:
        """Return the tensor's memory as an ndarray without a copy. Later writes and the next run change the array.

        The memory exists as long as the array does, even if the tensor is given other memory. Raises LiteArgumentError
        unless the tensor is contiguous and on the host."""
        self._for_host("get_data_by_share")
        layout = self.layout
        if not self.nbytes:
            return np.empty(layout.shapes, layout.dtype)
        holder = LiteTensor(copied(layout))
        address = self.get_ctypes_memory().value or 0
        library().call("tensor_share_memory_with", holder._handle, self._handle, said="get_data_by_share")
        return array_at(address, layout, (holder, self._kept.data))

    def to_numpy(self) -> np.ndarray:
        """Return a copy of the elements. The tensor may be on any device."""
        layout = self.layout
        result = np.empty(layout.shapes if layout.ndim else (0,), layout.dtype)
        if not result.size:
            return result
        on_host = self.is_pinned_host or self.device_type == LiteDeviceType.LITE_CPU
        source = self
        if not (on_host and self.is_continue):
            source = LiteTensor(copied(layout))
            source.copy_from(self)
        ctypes.memmove(result.ctypes.data, source.get_ctypes_memory(), result.nbytes)
        return result


def _numbers(call: str, argument: str, values: Any) -> list[int]:
    numbers: list[Any] = list(values) if isinstance(values, Iterable) else [values]
    if not all(isinstance(number, (int, np.integer)) for number in numbers):
        raise wrong(call, argument, "whole numbers", values)
    return [int(number) for number in numbers]
