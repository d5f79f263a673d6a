"""The memory of the stand-in: blocks of host memory that torch treats as memory of the device.

DLPack turns a host tensor into a device tensor that shares the host tensor's memory. To do so, this module writes the
device type kDLExtDev into the DLPack structure, and torch maps that type to PrivateUse1. In the same way, DLPack turns
a device tensor into a host view, for the code that emulates the device's processor.
"""

import ctypes
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

TOTAL = 1 << 30
"""The device's total memory in bytes."""

_HOST, _EXTENSION = 1, 12  # kDLCPU and kDLExtDev of dlpack.h
_FLOOR = 64  # the alignment of torch's own allocators

_lock = threading.Lock()
_allocated = 0


class _Block(bytearray):
    """Host memory that a finalizer can be attached to; a bare bytearray takes none."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    """The first fields of dlpack.h's DLTensor. A DLManagedTensor begins with a DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def free() -> int:
    return TOTAL - _allocated


def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    reach = 0 if 0 in sizes else 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    flat = torch.empty(0, dtype=dtype, device="cpu") if reach == 0 else _block(reach, dtype)
    return strided(_moved(flat, _EXTENSION), sizes, strides, 0)


def _block(count: int, dtype: torch.dtype) -> Tensor:
    """Return a new flat host tensor. Its memory counts as used device memory until no tensor holds it."""
    global _allocated
    size = max(_FLOOR, count * dtype.itemsize)
    with _lock:
        if size > TOTAL - _allocated:
            raise torch.OutOfMemoryError(f"the stand-in has {free()} bytes left, not {size}")
        _allocated += size
    block = _Block(size)
    weakref.finalize(block, _give_back, size)
    return torch.frombuffer(block, dtype=dtype)[:count]


def _give_back(size: int) -> None:
    global _allocated
    with _lock:
        _allocated -= size


def on_host(tensor: Tensor) -> Tensor:
    """Return a host view of a device tensor: the same memory, sizes, strides and offset."""
    storage = tensor.untyped_storage().nbytes()
    if storage == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    flat = strided(tensor, (storage // tensor.dtype.itemsize,), (1,), 0)
    return strided(_moved(flat, _HOST), tensor.shape, tensor.stride(), tensor.storage_offset())


def strided(
    tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int | torch.SymInt
) -> Tensor:
    """Return a view of the tensor's memory, on its device.

    torch's CPU kernel can make the view, although the memory is the device's, because the kernel reads no elements.
    """
    return torch.ops.aten.as_strided.default._op_dk(torch._C.DispatchKey.CPU, tensor, sizes, strides, offset)  # pyright: ignore[reportAttributeAccessIssue]


def _moved(flat: Tensor, kind: int) -> Tensor:
    capsule = torch._C._to_dlpack(flat)  # pyright: ignore[reportAttributeAccessIssue]
    described = _DLTensor.from_address(_pointer(capsule, b"dltensor"))
    described.device.kind, described.device.index = kind, 0
    return torch._C._from_dlpack(capsule)  # pyright: ignore[reportAttributeAccessIssue]
