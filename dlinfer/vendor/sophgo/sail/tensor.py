"""sail.Tensor: data in system memory, in a device's memory, or in both, which only its ``sync`` calls make equal."""

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, overload

import numpy as np

from dlinfer.vendor.sophgo.runtime.device import LARGEST, DeviceMemory
from dlinfer.vendor.sophgo.sail.arrays import decoded, element, encoded, fitting, taken
from dlinfer.vendor.sophgo.sail.checks import finite, is_count, made_by, refuse, shape_of, yes_or_no
from dlinfer.vendor.sophgo.sail.handle import Handle
from dlinfer.vendor.sophgo.sail.types import FLOATING, NUMPY, OF_NUMPY, Dtype


class Tensor:
    """Input or output of a network. Three ways to make one, as sophon-sail's documents give them:

    ``Tensor(handle, data, own_sys_data=True, own_dev_data=True)``: of a numpy array's shape and type. The data goes
    into system memory, which is the tensor's own copy, or without such memory to the device.
    ``Tensor(handle, shape, dtype, own_sys_data, own_dev_data)``: system memory is zeros, device memory is not cleared.
    ``Tensor(src, shape, offset)``: a part of another tensor's device memory, from element ``offset``; nothing is
    copied, and src's memory lives as long as this tensor.

    Elements of BM_FLOAT16 and BM_BFLOAT16 are numpy.uint16 on the host: their bits (``.view(numpy.float16)``).
    Calls raise SophgoCallError for what does not fit, and what a worker raises.
    """

    @overload
    def __init__(
        self, handle: Handle, data: np.ndarray, own_sys_data: bool = True, own_dev_data: bool = True
    ) -> None: ...
    @overload
    def __init__(
        self, handle: Handle, shape: Sequence[int], dtype: Dtype, own_sys_data: bool, own_dev_data: bool
    ) -> None: ...
    @overload
    def __init__(self, src: "Tensor", shape: Sequence[int], offset: int) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        made = made_by(_maker(args, kwargs), args, kwargs, "Tensor", _NO_FORM)
        self._shape, self._dtype, self._system, self._device, self._owns_device = made

    @classmethod
    def on(cls, memory: DeviceMemory, shape: Sequence[int], dtype: Dtype) -> "Tensor":
        """Return a tensor of memory that something else owns, such as a network's input."""
        tensor = cls.__new__(cls)
        tensor._shape, tensor._dtype = tuple(shape), dtype
        tensor._system, tensor._device, tensor._owns_device = None, memory, False
        return tensor

    # --- what it is

    def shape(self) -> list[int]:
        """Its sizes."""
        return list(self._shape)

    def dtype(self) -> Dtype:
        """Return the type of its elements."""
        return self._dtype

    def size(self) -> int:
        """Return how many elements it has."""
        return prod(self._shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return NUMPY[self._dtype].itemsize

    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size() * self.element_size()

    def own_sys_data(self) -> bool:
        """Return whether it has system memory."""
        return self._system is not None

    def own_dev_data(self) -> bool:
        """Return whether it has device memory of its own; a part of another tensor, or a network's tensor, has not."""
        return self._owns_device

    def device_id(self) -> int:
        """Return the number of the device that it lies on, -1 where it has no device memory."""
        return self._device.device.number if self._device is not None else -1

    def device_memory(self) -> DeviceMemory:
        """Where it lies on a device. Raises SophgoCallError where it has no device memory."""
        if self._device is None:
            raise refuse("Tensor", "it has no device memory (own_dev_data=False)")
        return self._device

    def reshape(self, shape: Sequence[int]) -> None:
        """Give it other sizes; not more bytes than it was made with."""
        sizes = shape_of("Tensor.reshape", shape)
        room = self._system.nbytes if self._system is not None else self.device_memory().size
        if prod(sizes) * self.element_size() > room:
            detail = f"shape {list(sizes)} takes more than the {room} bytes that it was made with"
            raise refuse("Tensor.reshape", detail)
        self._shape = sizes

    # --- data in and out

    def asnumpy(self, shape: Sequence[int] | None = None) -> np.ndarray:
        """Return a copy of what system memory holds, or without such memory of what the device holds.

        shape: sizes of the array, of at most as many elements.
        """
        sizes = self._sizes("Tensor.asnumpy", shape)
        if self._system is not None:
            return self._system[: prod(sizes)].copy().reshape(sizes)
        array = np.empty(sizes, NUMPY[self._dtype])
        self.device_memory().read(_flat(array))
        return array

    def update_data(self, data: np.ndarray) -> None:
        """Write ``data`` over the first elements, in system memory or without such memory on the device.

        data: of the tensor's type and at most its size; shapes may differ, the tensor keeps its own.
        """
        array = fitting("Tensor.update_data", data, self._dtype)
        self._check_room("Tensor.update_data", array.size)
        if self._system is not None:
            self._system[: array.size] = array.ravel()
        else:
            self.device_memory().write(_flat(array))

    def scale_from(self, data: np.ndarray, scale: float) -> None:
        """Write ``data * scale`` into system memory. data: float32 or integers, without NaN for a tensor of integers,
        which are rounded to the nearest and held within their range."""
        call = "Tensor.scale_from"
        array = taken(call, data)
        self._check_room(call, array.size)
        if array.dtype not in (np.float32, np.int32):
            raise refuse(call, f"{array.dtype} data; float32 or integers are scaled")
        values = array.astype(np.float64) * np.float32(finite(call, "scale", scale))
        if self._dtype not in FLOATING and np.isnan(values).any():
            raise refuse(call, f"NaN for a tensor of {self._dtype.name}")
        self._of_system(call)[: array.size] = encoded(values, self._dtype).ravel()

    def scale_to(self, scale: float, shape: Sequence[int] | None = None) -> np.ndarray:
        """Return what system memory holds, as float32, times ``scale``."""
        call = "Tensor.scale_to"
        sizes = self._sizes(call, shape)
        data = self._of_system(call)[: prod(sizes)]
        with np.errstate(over="ignore", invalid="ignore"):  # infinite, or infinity times 0
            return (decoded(data, self._dtype) * np.float32(finite(call, "scale", scale))).reshape(sizes)

    def memory_set(self, c: Any) -> None:
        """Set every element to the number ``c``, wherever the tensor has memory. Integers take it without its
        fraction; a number beyond the type's range is refused."""
        value = element("Tensor.memory_set", c, self._dtype)
        if self._system is not None:
            self._system[:] = value
        if self._device is not None:
            self._device.part(0, self.nbytes()).fill(value.tobytes())

    def zeros(self) -> None:
        """Set every element to 0."""
        self.memory_set(0)

    def ones(self) -> None:
        """Set every element to 1."""
        self.memory_set(1)

    # --- between system and device memory

    def sync_s2d(self, *args: Any, **kwargs: Any) -> None:
        """Copy from system memory to the device: ``sync_s2d()`` all of it, ``sync_s2d(size)`` the first bytes,
        ``sync_s2d(src, offset_src, offset_dst, len)`` elements of another tensor's system memory."""
        call = "Tensor.sync_s2d"
        source, (start, at, count) = self._range(call, args, kwargs)
        data = _flat(source._of_system(call))[start : start + count]
        self._device_of(call).write(data, at)

    def sync_d2s(self, *args: Any, **kwargs: Any) -> None:
        """Copy from the device to system memory: ``sync_d2s()`` all of it, ``sync_d2s(size)`` the first bytes,
        ``sync_d2s(src, offset_src, offset_dst, len)`` elements of another tensor's device memory."""
        call = "Tensor.sync_d2s"
        source, (start, at, count) = self._range(call, args, kwargs)
        data = _flat(self._of_system(call))[at : at + count]
        source._device_of(call).read(data, start)

    def sync_d2d(self, src: "Tensor", offset_src: int, offset_dst: int, len: int) -> None:
        """Copy ``len`` elements of another tensor's device memory, which may be on another device."""
        call = "Tensor.sync_d2d"
        source, (start, at, count) = self._range(call, (src, offset_src, offset_dst, len), {})
        self._device_of(call).copy_from(source._device_of(call), at, start, count)

    def sync_d2d_stride(self, src: "Tensor", stride_src: int, stride_dst: int, count: int) -> None:
        """Copy ``count`` elements of another tensor's device memory: each stride_src-th to each stride_dst-th here.

        stride_dst is 1, or 4 where stride_src is 1 and elements have one byte; count times each stride is within its
        tensor. They go through the host, on chips too, and whole: count times the strides in bytes.
        """
        call = "Tensor.sync_d2d_stride"
        source = self._other(call, src)
        if not all(map(is_count, (stride_src, stride_dst, count))) or not stride_src:
            detail = f"strides {stride_src!r}, {stride_dst!r} and count {count!r}: numbers of elements"
            raise refuse(call, detail)
        if stride_dst != 1 and (stride_dst, stride_src, self.element_size()) != (4, 1, 1):
            raise refuse(call, f"stride_dst {stride_dst}; it is 1, or 4 for bytes that stride_src 1 reads")
        stride_src, stride_dst, count = int(stride_src), int(stride_dst), int(count)
        if count * stride_src > src.size() or count * stride_dst > self.size():
            detail = f"{count} elements in strides of {stride_src} of {src.size()} and of {stride_dst} of {self.size()}"
            raise refuse(call, detail)
        target, memory = self._device_of(call), source._device_of(call)
        if not count:
            return
        taken = np.empty((count - 1) * stride_src + 1, NUMPY[self._dtype])
        memory.read(_flat(taken))
        written = np.empty((count - 1) * stride_dst + 1, NUMPY[self._dtype])
        if stride_dst > 1:
            target.read(_flat(written))  # what lies between stays
        written[::stride_dst] = taken[::stride_src]
        target.write(_flat(written))

    def dump_data(self, file_name: str, bin: bool = False) -> None:
        """Write what system memory holds, or without such memory the device, to a file.

        bin: the bytes as they are; else text, a line for each row of the last dimension, which numpy.loadtxt reads:
        integers, and floating point with four decimals.
        """
        call = "Tensor.dump_data"
        if not isinstance(file_name, (str, os.PathLike)):
            raise refuse(call, f"file_name {file_name!r} is no path")
        binary = yes_or_no(call, "bin", bin)
        array = self.asnumpy()
        try:
            if binary:
                array.tofile(file_name)
            else:
                rows = decoded(array, self._dtype) if self._dtype in FLOATING else array
                form = "%.4f" if self._dtype in FLOATING else "%d"
                np.savetxt(os.fspath(file_name), rows.reshape(-1, self._shape[-1]), fmt=form)
        except (OSError, ValueError) as error:
            raise refuse(call, f"{file_name!r} cannot be written: {error}") from None

    def _other(self, call: str, src: Any) -> "Tensor":
        """Another tensor of the same type."""
        if not isinstance(src, Tensor):
            raise refuse(call, f"{type(src).__name__} is no sail.Tensor")
        if src._dtype != self._dtype:
            raise refuse(call, f"a tensor of {src._dtype.name} into one of {self._dtype.name}")
        return src

    def _range(self, call: str, args: Any, kwargs: Any) -> tuple["Tensor", tuple[int, int, int]]:
        """(whose data, (its first byte, the first byte here, bytes)) of a sync's arguments."""
        if not args and not kwargs:
            return self, (0, 0, self.nbytes())
        if len(args) + len(kwargs) == 1:
            (size,) = (*args, *(kwargs.get(name) for name in kwargs))
            if set(kwargs) - {"size"} or not is_count(size) or size > self.nbytes():
                raise refuse(call, f"size {size!r}: a number of bytes up to {self.nbytes()}")
            return self, (0, 0, int(size))
        given, start, at, count = made_by(_four, args, kwargs, call, _NO_FORM)
        src = self._other(call, given)
        if not all(map(is_count, (start, at, count))):
            raise refuse(call, f"offsets {start!r}, {at!r} and length {count!r}: numbers of elements")
        start, at, count = int(start), int(at), int(count)  # numpy's small ones would wrap around
        if start + count > src.size() or at + count > self.size():
            detail = f"elements {start} to {start + count} of {src.size()} to {at} and on of {self.size()}"
            raise refuse(call, detail)
        width = self.element_size()
        return src, (start * width, at * width, count * width)

    # --- memory

    def _sizes(self, call: str, shape: Sequence[int] | None) -> tuple[int, ...]:
        """Those asked for, of no more elements than there are, or else its own."""
        sizes = self._shape if shape is None else shape_of(call, shape)
        self._check_room(call, prod(sizes))
        return sizes

    def _of_system(self, call: str) -> np.ndarray:
        if self._system is None:
            raise refuse(call, "a tensor without system memory (own_sys_data=False)")
        return self._system

    def _device_of(self, call: str) -> DeviceMemory:
        if self._device is None:
            raise refuse(call, "a tensor without device memory (own_dev_data=False)")
        return self._device

    def _check_room(self, call: str, count: int) -> None:
        if count > self.size():
            raise refuse(call, f"{count} elements for a tensor of shape {list(self._shape)}")


_NO_FORM = "its arguments are none of its forms"
_Made = tuple[tuple[int, ...], Dtype, np.ndarray | None, DeviceMemory | None, bool]
"""(shape, dtype, system memory, device memory, whether that is its own)."""


def _maker(args: Any, kwargs: Any) -> Callable[..., _Made]:
    first = args[0] if args else kwargs.get("handle", kwargs.get("src"))
    if isinstance(first, Tensor):
        return _part
    if not isinstance(first, Handle):
        raise refuse("Tensor", f"{type(first).__name__} is neither a sail.Handle nor a sail.Tensor")
    second = args[1] if len(args) > 1 else kwargs.get("data", kwargs.get("shape"))
    return _of_array if isinstance(second, np.ndarray) else _of_shape


def _of_array(handle: Handle, data: Any, own_sys_data: bool = True, own_dev_data: bool = True) -> _Made:
    array = taken("Tensor", data)
    shape_of("Tensor", array.shape)
    own_sys_data, own_dev_data = _owned(own_sys_data, own_dev_data)
    dtype = OF_NUMPY[array.dtype]
    flat = np.array(array, copy=True).ravel().view(NUMPY[dtype])  # never the caller's own memory
    if not own_sys_data and not own_dev_data:
        raise refuse("Tensor", "data for a tensor with neither system nor device memory")
    memory = handle.device.allocate(flat.nbytes) if own_dev_data else None
    if memory is not None and not own_sys_data:
        memory.write(_flat(flat))
    return array.shape, dtype, flat if own_sys_data else None, memory, own_dev_data


def _of_shape(handle: Handle, shape: Any, dtype: Any, own_sys_data: bool, own_dev_data: bool) -> _Made:
    sizes = shape_of("Tensor", shape)
    if not isinstance(dtype, Dtype):
        raise refuse("Tensor", f"{dtype!r} is no sail.Dtype")
    own_sys_data, own_dev_data = _owned(own_sys_data, own_dev_data)
    size = prod(sizes) * NUMPY[dtype].itemsize
    if size > LARGEST:
        raise refuse("Tensor", f"shape {list(sizes)} takes {size} bytes; a tensor has at most {LARGEST}")
    system = np.zeros(prod(sizes), NUMPY[dtype]) if own_sys_data else None
    return sizes, dtype, system, handle.device.allocate(size) if own_dev_data else None, own_dev_data


def _part(src: Tensor, shape: Any, offset: int) -> _Made:
    sizes = shape_of("Tensor", shape)
    if not is_count(offset) or int(offset) + prod(sizes) > src.size():
        raise refuse("Tensor", f"shape {list(sizes)} from element {offset!r} of {src.size()}")
    width = src.element_size()
    memory = src.device_memory().part(int(offset) * width, prod(sizes) * width)
    return sizes, src.dtype(), None, memory, False


def _owned(own_sys_data: Any, own_dev_data: Any) -> tuple[bool, bool]:
    given = {"own_sys_data": own_sys_data, "own_dev_data": own_dev_data}
    system, device = (yes_or_no("Tensor", name, value) for name, value in given.items())
    return system, device


def _four(src: Any, offset_src: Any, offset_dst: Any, len: Any) -> tuple[Any, Any, Any, Any]:
    return src, offset_src, offset_dst, len


def _flat(array: np.ndarray) -> memoryview:
    """The bytes of an array that lies in one piece."""
    return array.reshape(-1).view(np.uint8).data
