"""sail.Tensor: a tensor in system memory, in device memory, or in both. Only ``sync`` calls copy between the two."""

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
    """An input or output of a network. sophon-sail documents three forms of the constructor:

    ``Tensor(handle, data, own_sys_data=True, own_dev_data=True)``: copies the numpy array ``data`` to system memory; to
        the device if the tensor has no system memory.
    ``Tensor(handle, shape, dtype, own_sys_data, own_dev_data)``: system memory is zeros, device memory is not cleared.
    ``Tensor(src, shape, offset)``: a view of another tensor's device memory from element ``offset`` on. It keeps this
        memory alive.

    System memory has elements of BM_FLOAT16 and BM_BFLOAT16 as bits in numpy.uint16 (``.view(numpy.float16)``). Methods
    raise SophgoCallError for bad arguments, and the errors of a worker.
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
        state = made_by(_maker(args, kwargs), args, kwargs, "Tensor", _NO_FORM)
        self._shape, self._dtype, self._system, self._device, self._owns_device = state

    @classmethod
    def on(cls, memory: DeviceMemory, shape: Sequence[int], dtype: Dtype) -> "Tensor":
        """Return a tensor on memory that another object owns, such as the memory of a network's input."""
        tensor = cls.__new__(cls)
        tensor._shape, tensor._dtype = tuple(shape), dtype
        tensor._system, tensor._device, tensor._owns_device = None, memory, False
        return tensor

    # --- properties

    def shape(self) -> list[int]:
        return list(self._shape)

    def dtype(self) -> Dtype:
        return self._dtype

    def size(self) -> int:
        return prod(self._shape)

    def element_size(self) -> int:
        return NUMPY[self._dtype].itemsize

    def nbytes(self) -> int:
        """Return the size in bytes of all elements together."""
        return self.size() * self.element_size()

    def own_sys_data(self) -> bool:
        """Return whether the tensor has system memory."""
        return self._system is not None

    def own_dev_data(self) -> bool:
        """Return whether the tensor owns device memory.

        A view does not, nor does a tensor on a network's own memory.
        """
        return self._owns_device

    def device_id(self) -> int:
        """Return the number of the device; -1 if the tensor has no device memory."""
        return self._device.device.number if self._device is not None else -1

    def device_memory(self) -> DeviceMemory:
        """Return the tensor's device memory. Raises SophgoCallError if it has none."""
        if self._device is None:
            raise refuse("Tensor", "it has no device memory (own_dev_data=False)")
        return self._device

    def reshape(self, shape: Sequence[int]) -> None:
        """Change the sizes. Raises SophgoCallError if the tensor's memory is too small for them."""
        sizes = shape_of("Tensor.reshape", shape)
        room = self._system.nbytes if self._system is not None else self.device_memory().size
        if prod(sizes) * self.element_size() > room:
            detail = f"shape {list(sizes)} takes more than its {room} bytes"
            raise refuse("Tensor.reshape", detail)
        self._shape = sizes

    # --- data in and out

    def asnumpy(self, shape: Sequence[int] | None = None) -> np.ndarray:
        """Return a copy of the elements, from system memory or, without system memory, from the device.

        shape: the sizes of the result, with at most as many elements as the tensor has; None means the tensor's sizes.
        """
        sizes = self._sizes("Tensor.asnumpy", shape)
        if self._system is not None:
            return self._system[: prod(sizes)].copy().reshape(sizes)
        array = np.empty(sizes, NUMPY[self._dtype])
        self.device_memory().read(_flat(array))
        return array

    def update_data(self, data: np.ndarray) -> None:
        """Write ``data`` over the first elements, in system memory or, without system memory, on the device.

        data: an array of the tensor's dtype, with at most as many elements, in any shape. The tensor keeps its shape.
        """
        array = fitting("Tensor.update_data", data, self._dtype)
        self._check_room("Tensor.update_data", array.size)
        if self._system is not None:
            self._system[: array.size] = array.ravel()
        else:
            self.device_memory().write(_flat(array))

    def scale_from(self, data: np.ndarray, scale: float) -> None:
        """Write ``data * scale`` over the first elements in system memory. data: an array of float32 or integers.

        An integer tensor rounds to nearest, clamps to the range of its dtype, and refuses NaN.
        """
        call = "Tensor.scale_from"
        array = taken(call, data)
        self._check_room(call, array.size)
        if array.dtype not in (np.float32, np.int32):
            raise refuse(call, f"{array.dtype} data cannot be scaled, only float32 and integers")
        values = array.astype(np.float64) * np.float32(finite(call, "scale", scale))
        if self._dtype not in FLOATING and np.isnan(values).any():
            raise refuse(call, f"a tensor of {self._dtype.name} cannot hold NaN")
        self._of_system(call)[: array.size] = encoded(values, self._dtype).ravel()

    def scale_to(self, scale: float, shape: Sequence[int] | None = None) -> np.ndarray:
        """Return the elements in system memory as float32, times ``scale``.

        shape: the sizes of the result; None means the tensor's sizes.
        """
        call = "Tensor.scale_to"
        sizes = self._sizes(call, shape)
        data = self._of_system(call)[: prod(sizes)]
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # results may be infinite, or NaN for infinity times 0
            return (decoded(data, self._dtype) * np.float32(finite(call, "scale", scale))).reshape(sizes)

    def memory_set(self, c: Any) -> None:
        """Set every element to the number ``c``, both in system memory and in device memory.

        An integer tensor drops the fraction of ``c``. Raises SophgoCallError for a number beyond the range of the
        dtype.
        """
        value = element("Tensor.memory_set", c, self._dtype)
        if self._system is not None:
            self._system[:] = value
        if self._device is not None:
            self._device.part(0, self.nbytes()).fill(value.tobytes())

    def zeros(self) -> None:
        self.memory_set(0)

    def ones(self) -> None:
        self.memory_set(1)

    # --- between system and device memory

    def sync_s2d(self, *args: Any, **kwargs: Any) -> None:
        """Copy from system memory to device memory.

        ``sync_s2d()``: copies all of this tensor.
        ``sync_s2d(size)``: copies the first ``size`` bytes of this tensor.
        ``sync_s2d(src, offset_src, offset_dst, len)``: copies ``len`` elements from the system memory of the tensor
            ``src``.
        """
        call = "Tensor.sync_s2d"
        source, (start, at, count) = self._range(call, args, kwargs)
        data = _flat(source._of_system(call))[start : start + count]
        self._device_of(call).write(data, at)

    def sync_d2s(self, *args: Any, **kwargs: Any) -> None:
        """Copy from device memory to system memory.

        ``sync_d2s()``: copies all of this tensor.
        ``sync_d2s(size)``: copies the first ``size`` bytes of this tensor.
        ``sync_d2s(src, offset_src, offset_dst, len)``: copies ``len`` elements from the device memory of the tensor
            ``src``.
        """
        call = "Tensor.sync_d2s"
        source, (start, at, count) = self._range(call, args, kwargs)
        data = _flat(self._of_system(call))[at : at + count]
        source._device_of(call).read(data, start)

    def sync_d2d(self, src: "Tensor", offset_src: int, offset_dst: int, len: int) -> None:
        """Copy ``len`` elements from ``src``'s device memory to this tensor's device memory. The devices may differ."""
        call = "Tensor.sync_d2d"
        source, (start, at, count) = self._range(call, (src, offset_src, offset_dst, len), {})
        self._device_of(call).copy_from(source._device_of(call), at, start, count)

    def sync_d2d_stride(self, src: "Tensor", stride_src: int, stride_dst: int, count: int) -> None:
        """Copy ``count`` elements from ``src``'s device memory to this tensor's device memory, with strides.

        Element i * stride_src of ``src`` becomes element i * stride_dst of this tensor. stride_dst must be 1; it may be
        4 if stride_src is 1 and elements have one byte. In each tensor, ``count`` times its stride must not exceed the
        number of elements. The data goes through the host, gaps included, even on a chip.
        """
        call = "Tensor.sync_d2d_stride"
        source = self._other(call, src)
        if not all(map(is_count, (stride_src, stride_dst, count))) or not stride_src:
            detail = f"strides {stride_src!r}, {stride_dst!r} and count {count!r} must be numbers of elements"
            raise refuse(call, detail)
        if stride_dst != 1 and (stride_dst, stride_src, self.element_size()) != (4, 1, 1):
            raise refuse(
                call, f"stride_dst {stride_dst} must be 1, or 4 for bytes that are read with stride_src 1"
            )
        stride_src, stride_dst, count = int(stride_src), int(stride_dst), int(count)
        if count * stride_src > src.size() or count * stride_dst > self.size():
            detail = (
                f"{count} elements do not fit with stride {stride_src} into {src.size()} and with stride "
                f"{stride_dst} into {self.size()}"
            )
            raise refuse(call, detail)
        target, memory = self._device_of(call), source._device_of(call)
        if not count:
            return
        values = np.empty((count - 1) * stride_src + 1, NUMPY[self._dtype])
        memory.read(_flat(values))
        result = np.empty((count - 1) * stride_dst + 1, NUMPY[self._dtype])
        if stride_dst > 1:
            target.read(_flat(result))  # keeps the elements between
        result[::stride_dst] = values[::stride_src]
        target.write(_flat(result))

    def dump_data(self, file_name: str, bin: bool = False) -> None:
        """Write the elements to a file, from system memory or, without system memory, from the device.

        bin: True writes raw bytes. False writes text for numpy.loadtxt: one line for each row of the last dimension,
            with four decimals for floating point.
        """
        call = "Tensor.dump_data"
        if not isinstance(file_name, (str, os.PathLike)):
            raise refuse(call, f"file_name {file_name!r} is not a path")
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
        """Return ``src``. Raises SophgoCallError unless it is a Tensor with this tensor's dtype."""
        if not isinstance(src, Tensor):
            raise refuse(call, f"{type(src).__name__} is not a sail.Tensor")
        if src._dtype != self._dtype:
            raise refuse(
                call, f"a tensor of {src._dtype.name} cannot be copied into one of {self._dtype.name}"
            )
        return src

    def _range(self, call: str, args: Any, kwargs: Any) -> tuple["Tensor", tuple[int, int, int]]:
        """Parse the arguments of ``sync_s2d`` or ``sync_d2s``.

        Return the source tensor and three numbers of bytes: the start in the source, the start in this tensor, and the
        length.
        """
        if not args and not kwargs:
            return self, (0, 0, self.nbytes())
        if len(args) + len(kwargs) == 1:
            (size,) = (*args, *(kwargs.get(name) for name in kwargs))
            if set(kwargs) - {"size"} or not is_count(size) or size > self.nbytes():
                raise refuse(call, f"size {size!r} must be a number of bytes up to {self.nbytes()}")
            return self, (0, 0, int(size))
        other, start, at, count = made_by(_four, args, kwargs, call, _NO_FORM)
        src = self._other(call, other)
        if not all(map(is_count, (start, at, count))):
            raise refuse(call, f"offsets {start!r}, {at!r} and length {count!r} must be numbers of elements")
        start, at, count = int(start), int(at), int(count)  # numpy's small integers would wrap around
        if start + count > src.size() or at + count > self.size():
            detail = (
                f"elements {start} to {start + count} of {src.size()} do not fit at {at} and on of "
                f"{self.size()}"
            )
            raise refuse(call, detail)
        width = self.element_size()
        return src, (start * width, at * width, count * width)

    # --- memory

    def _sizes(self, call: str, shape: Sequence[int] | None) -> tuple[int, ...]:
        """Return ``shape`` or, if it is None, the tensor's shape.

        Raises SophgoCallError if ``shape`` has more elements than the tensor.
        """
        sizes = self._shape if shape is None else shape_of(call, shape)
        self._check_room(call, prod(sizes))
        return sizes

    def _of_system(self, call: str) -> np.ndarray:
        if self._system is None:
            raise refuse(call, "the tensor has no system memory (own_sys_data=False)")
        return self._system

    def _device_of(self, call: str) -> DeviceMemory:
        if self._device is None:
            raise refuse(call, "the tensor has no device memory (own_dev_data=False)")
        return self._device

    def _check_room(self, call: str, count: int) -> None:
        if count > self.size():
            raise refuse(call, f"{count} elements do not fit a tensor of shape {list(self._shape)}")


_NO_FORM = "the arguments match none of its forms"
_Made = tuple[tuple[int, ...], Dtype, np.ndarray | None, DeviceMemory | None, bool]
"""The state of a new tensor: shape, dtype, system memory, device memory, and whether it owns the device memory."""


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
        raise refuse("Tensor", "data was passed for a tensor with neither system nor device memory")
    memory = handle.device.allocate(flat.nbytes) if own_dev_data else None
    if memory is not None and not own_sys_data:
        memory.write(_flat(flat))
    return array.shape, dtype, flat if own_sys_data else None, memory, own_dev_data


def _of_shape(handle: Handle, shape: Any, dtype: Any, own_sys_data: bool, own_dev_data: bool) -> _Made:
    sizes = shape_of("Tensor", shape)
    if not isinstance(dtype, Dtype):
        raise refuse("Tensor", f"{dtype!r} is not a sail.Dtype")
    own_sys_data, own_dev_data = _owned(own_sys_data, own_dev_data)
    size = prod(sizes) * NUMPY[dtype].itemsize
    if size > LARGEST:
        raise refuse("Tensor", f"shape {list(sizes)} takes {size} bytes; a tensor has at most {LARGEST}")
    system = np.zeros(prod(sizes), NUMPY[dtype]) if own_sys_data else None
    return sizes, dtype, system, handle.device.allocate(size) if own_dev_data else None, own_dev_data


def _part(src: Tensor, shape: Any, offset: int) -> _Made:
    sizes = shape_of("Tensor", shape)
    if not is_count(offset) or int(offset) + prod(sizes) > src.size():
        raise refuse(
            "Tensor",
            f"shape {list(sizes)} from element {offset!r} on does not fit into {src.size()} elements",
        )
    width = src.element_size()
    memory = src.device_memory().part(int(offset) * width, prod(sizes) * width)
    return sizes, src.dtype(), None, memory, False


def _owned(own_sys_data: Any, own_dev_data: Any) -> tuple[bool, bool]:
    system = yes_or_no("Tensor", "own_sys_data", own_sys_data)
    return system, yes_or_no("Tensor", "own_dev_data", own_dev_data)


def _four(src: Any, offset_src: Any, offset_dst: Any, len: Any) -> tuple[Any, Any, Any, Any]:
    return src, offset_src, offset_dst, len


def _flat(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
