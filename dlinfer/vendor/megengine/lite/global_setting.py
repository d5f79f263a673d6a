"""LiteGlobal, which has the settings of the process, and the functions for the log level."""

import ctypes
import os
from typing import Any

from dlinfer.vendor.megengine.lite import decryption
from dlinfer.vendor.megengine.lite.binding import devices
from dlinfer.vendor.megengine.lite.binding.checks import existing, instance, member, whole, writable
from dlinfer.vendor.megengine.lite.binding.enums import LiteBackend, LiteLogLevel
from dlinfer.vendor.megengine.lite.binding.library import library


def set_log_level(level: int) -> None:
    """Let the library print messages of ``level`` and above. Raises LiteArgumentError."""
    library().call("set_log_level", member("set_log_level", "level", LiteLogLevel, level))


def get_log_level() -> LiteLogLevel:
    return LiteLogLevel(library().ask("get_log_level"))


class LiteGlobal:
    """Settings for all networks of the process."""

    register_decryption_and_key = staticmethod(decryption.register_decryption_and_key)
    update_decryption_key = staticmethod(decryption.update_decryption_key)
    get_device_count = staticmethod(devices.device_count)

    @staticmethod
    def set_loader_lib_path(path: str | os.PathLike[str]) -> None:
        """Load a hardware vendor's loader, a shared library with the function ``mgb_c_opr_init``, into this process."""
        library().call("set_loader_lib_path", existing("set_loader_lib_path", path))

    @staticmethod
    def set_persistent_cache(path: str | os.PathLike[str], always_sync: bool = False) -> None:
        """Set the file that caches the algorithms chosen for ops, and read it if it exists.

        always_sync: write the file at each new choice."""
        library().call("set_persistent_cache", writable("set_persistent_cache", path), int(always_sync))

    @staticmethod
    def dump_persistent_cache(path: str | os.PathLike[str]) -> None:
        """Write the algorithms chosen for ops to a file."""
        library().call("dump_persistent_cache", writable("dump_persistent_cache", path))

    @staticmethod
    def try_coalesce_all_free_memory() -> None:
        library().call("try_coalesce_all_free_memory")

    @staticmethod
    def set_tensorrt_cache(path: str | os.PathLike[str]) -> None:
        """Set the file that caches TensorRT's engines."""
        library().call("set_tensor_rt_cache", writable("set_tensorrt_cache", path), said="set_tensorrt_cache")

    @staticmethod
    def dump_tensorrt_cache() -> None:
        """Write TensorRT's engines to the file that ``set_tensorrt_cache`` set."""
        library().call("dump_tensor_rt_cache", said="dump_tensorrt_cache")

    @staticmethod
    def register_memory_pair(
        vir_ptr: ctypes.c_void_p,
        phy_ptr: ctypes.c_void_p,
        length: int,
        device: int,
        backend: int = LiteBackend.LITE_DEFAULT,
    ) -> None:
        """Register the physical address of a virtual address. Raises LiteLackError: no build has this function."""
        call = "register_memory_pair"
        addresses = _addresses(call, vir_ptr=vir_ptr, phy_ptr=phy_ptr)
        size = whole(call, "length", length, 0, 2**63 - 1)
        library().call(call, *addresses, size, *_place(call, device, backend))

    @staticmethod
    def clear_memory_pair(
        vir_ptr: ctypes.c_void_p,
        phy_ptr: ctypes.c_void_p,
        device: int,
        backend: int = LiteBackend.LITE_DEFAULT,
    ) -> None:
        """Remove the pair of a virtual and a physical address. Raises LiteLackError: no build has this function."""
        call = "clear_memory_pair"
        addresses = _addresses(call, vir_ptr=vir_ptr, phy_ptr=phy_ptr)
        library().call(call, *addresses, *_place(call, device, backend))

    @staticmethod
    def lookup_physic_ptr(
        vir_ptr: ctypes.c_void_p, device: int, backend: int = LiteBackend.LITE_DEFAULT
    ) -> ctypes.c_void_p:
        """Return the physical address of a virtual address. Raises LiteLackError: no build has this function."""
        call, physical = "lookup_physic_ptr", ctypes.c_void_p()
        addresses = _addresses(call, vir_ptr=vir_ptr)
        library().call(call, *addresses, ctypes.byref(physical), *_place(call, device, backend))
        return physical


def _addresses(call: str, **pointers: Any) -> list[ctypes.c_void_p]:
    return [instance(call, argument, ctypes.c_void_p, pointer) for argument, pointer in pointers.items()]


def _place(call: str, device: int, backend: int) -> tuple[int, LiteBackend]:
    return devices.checked(call, device), member(call, "backend", LiteBackend, backend)
