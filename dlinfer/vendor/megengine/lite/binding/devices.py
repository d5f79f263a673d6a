"""Checks that a device is there before it is used: an Atlas tensor without an Atlas crashes the process at its exit."""

from dlinfer.vendor.megengine.errors import LiteError
from dlinfer.vendor.megengine.lite.binding.checks import member
from dlinfer.vendor.megengine.lite.binding.enums import LiteDeviceType
from dlinfer.vendor.megengine.lite.binding.library import library

_NATIVE_DEFAULT = 7
"""The C header's number of LITE_DEVICE_DEFAULT. Its documented number, 5, is another device in the header."""

_ALWAYS = (LiteDeviceType.LITE_CPU, LiteDeviceType.LITE_DEVICE_DEFAULT)


def device_count(device_type: int) -> int:
    """Return the number of devices of a type. Raises LiteError for a type that the library does not know."""
    native = checked("get_device_count", device_type)
    return library().ask("get_device_count", native, said=f"get_device_count({device_type!r})")


def usable(call: str, device_type: int) -> int:
    """Return the C header's number of a device type. Raises LiteArgumentError, and LiteError if it has no device."""
    native = checked(call, device_type)
    if device_type not in _ALWAYS and not device_count(device_type):
        raise LiteError(call=call, detail=f"this machine has no {LiteDeviceType(device_type).name}")
    return native


def checked(call: str, device_type: int) -> int:
    """Return the C header's number of a device type, even if it has no device here. Raises LiteArgumentError."""
    device = member(call, "device_type", LiteDeviceType, device_type)
    return _NATIVE_DEFAULT if device is LiteDeviceType.LITE_DEVICE_DEFAULT else int(device)


def documented(number: int) -> LiteDeviceType:
    return LiteDeviceType.LITE_DEVICE_DEFAULT if number == _NATIVE_DEFAULT else LiteDeviceType(number)
