"""LiteGlobal, and the level of the log."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from dlinfer.vendor.megengine.lite import decryption
from dlinfer.vendor.megengine.lite.binding import devices
from dlinfer.vendor.megengine.lite.binding.checks import existing, instance, member, whole, writable
from dlinfer.vendor.megengine.lite.binding.enums import LiteBackend, LiteLogLevel
from dlinfer.vendor.megengine.lite.binding.library import library


def set_log_level(level: int) -> None:
    """What the library prints from now on. Raises LiteArgumentError."""
    library().call("set_log_level", member("set_log_level", "level", LiteLogLevel, level))


def get_log_level() -> LiteLogLevel:
    """Return what the library prints now."""
    level = ctypes.c_int()
    library().call("get_log_level", ctypes.byref(level))
    return LiteLogLevel(level.value)


class LiteGlobal:
    """What counts for all networks of the process."""

    @staticmethod
    def register_decryption_and_key(
        decryption_name: str, decryption_func: Any, key: Sequence[int] | bytes
    ) -> None:
        """Make a decryption known under a name; see ``decryption.register_decryption_and_key``."""
        decryption.register_decryption_and_key(decryption_name, decryption_func, key)

    @staticmethod
    def update_decryption_key(decryption_name: str, key: Sequence[int] | bytes) -> None:
        """Another key for a decryption; see ``decryption.update_decryption_key``."""
        decryption.update_decryption_key(decryption_name, key)

    @staticmethod
    def set_loader_lib_path(path: str | os.PathLike[str]) -> None:
        """Load a vendor's loader, a shared library with ``mgb_c_opr_init``. Its code runs in this process."""
        library().call("set_loader_lib_path", existing("set_loader_lib_path", path))

    @staticmethod
    def set_persistent_cache(path: str | os.PathLike[str], always_sync: bool = False) -> None:
        """Take algorithms from a file, which need not be there; ``always_sync`` writes it at each change."""
        call = "set_persistent_cache"
        library().call(call, writable(call, path), int(always_sync))

    @staticmethod
    def dump_persistent_cache(path: str | os.PathLike[str]) -> None:
        """Write the algorithms that were found to a file."""
        call = "dump_persistent_cache"
        library().call(call, writable(call, path))

    @staticmethod
    def get_device_count(device_type: int) -> int:
        """Return how many devices of a kind there are."""
        return devices.device_count(device_type)

    @staticmethod
    def try_coalesce_all_free_memory() -> None:
        """Give back memory that nothing uses."""
        library().call("try_coalesce_all_free_memory")

    @staticmethod
    def set_tensorrt_cache(path: str | os.PathLike[str]) -> None:
        """Where TensorRT's engines are kept."""
        library().call("set_tensor_rt_cache", writable("set_tensorrt_cache", path), said="set_tensorrt_cache")

    @staticmethod
    def dump_tensorrt_cache() -> None:
        """Write TensorRT's engines there."""
        library().call("dump_tensor_rt_cache", said="dump_tensorrt_cache")

    @staticmethod
    def register_memory_pair(
        vir_ptr: ctypes.c_void_p,
        phy_ptr: ctypes.c_void_p,
        length: int,
        device: int,
        backend: int = LiteBackend.LITE_DEFAULT,
    ) -> None:
        """Tell of a virtual address with its physical one. Raises LiteLackError: no build has it."""
        call = "register_memory_pair"
        library().call(
            call,
            instance(call, "vir_ptr", ctypes.c_void_p, vir_ptr),
            instance(call, "phy_ptr", ctypes.c_void_p, phy_ptr),
            whole(call, "length", length, 0, 2**63 - 1),
            devices.checked(call, device),
            member(call, "backend", LiteBackend, backend),
        )

    @staticmethod
    def clear_memory_pair(
        vir_ptr: ctypes.c_void_p,
        phy_ptr: ctypes.c_void_p,
        device: int,
        backend: int = LiteBackend.LITE_DEFAULT,
    ) -> None:
        """Forget such a pair. Raises LiteLackError: no build has it."""
        call = "clear_memory_pair"
        library().call(
            call,
            instance(call, "vir_ptr", ctypes.c_void_p, vir_ptr),
            instance(call, "phy_ptr", ctypes.c_void_p, phy_ptr),
            devices.checked(call, device),
            member(call, "backend", LiteBackend, backend),
        )

    @staticmethod
    def lookup_physic_ptr(
        vir_ptr: ctypes.c_void_p, device: int, backend: int = LiteBackend.LITE_DEFAULT
    ) -> ctypes.c_void_p:
        """Return the physical address of a virtual one. Raises LiteLackError: no build has it."""
        call, found = "lookup_physic_ptr", ctypes.c_void_p()
        library().call(
            call,
            instance(call, "vir_ptr", ctypes.c_void_p, vir_ptr),
            ctypes.byref(found),
            devices.checked(call, device),
            member(call, "backend", LiteBackend, backend),
        )
        return found
