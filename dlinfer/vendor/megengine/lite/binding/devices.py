"""Checks that this machine has a device before the library uses the device.

Without the check, a tensor on an Atlas device that is not there would crash the process at its exit."""

from dlinfer.vendor.megengine.errors import LiteError
from dlinfer.vendor.megengine.lite.binding.checks import member
from dlinfer.vendor.megengine.lite.binding.enums import LiteDeviceType
from dlinfer.vendor.megengine.lite.binding.library import library

_NATIVE_DEFAULT = 7
"""The C header's number of LITE_DEVICE_DEFAULT. MegEngine's document says 5, but in the header 5 is another device."""

_ALWAYS = (LiteDeviceType.LITE_CPU, LiteDeviceType.LITE_DEVICE_DEFAULT)


def device_count(device_type: int) -> int:
    """Return how many devices of a type this machine has. Raises LiteError for a type that the library lacks."""
    native = checked("get_device_count", device_type)
    return library().ask("get_device_count", native, said=f"get_device_count({device_type!r})")


def usable(call: str, device_type: int) -> int:
    """Return a device type as the C header numbers it.

    device_type: the type as ``LiteDeviceType`` numbers it. Only LITE_DEVICE_DEFAULT has another number in the header.
    Raises LiteError if this machine has no device of this type.
    Raises LiteArgumentError for an unknown type."""
    native = checked(call, device_type)
    if device_type not in _ALWAYS and not device_count(device_type):
        raise LiteError(call=call, detail=f"this machine has no {LiteDeviceType(device_type).name}")
    return native


def checked(call: str, device_type: int) -> int:
    """Return what ``usable`` returns, even if this machine has no device of the type. Raises LiteArgumentError."""
    device = member(call, "device_type", LiteDeviceType, device_type)
    return _NATIVE_DEFAULT if device is LiteDeviceType.LITE_DEVICE_DEFAULT else int(device)


def documented(number: int) -> LiteDeviceType:
    return LiteDeviceType.LITE_DEVICE_DEFAULT if number == _NATIVE_DEFAULT else LiteDeviceType(number)
