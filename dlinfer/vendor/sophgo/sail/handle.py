"""sail.Handle: a device, named by its number."""

from dlinfer.vendor.sophgo.errors import SophgoUnavailableError
from dlinfer.vendor.sophgo.runtime import chips
from dlinfer.vendor.sophgo.runtime.device import Device, number_of, open_device


class Handle:
    """A device. tpu_id: the device's number.

    A real device is opened at once. An emulated device is opened at its first use, because a program creates its
    handles before a bmodel decides which chip to emulate.
    Raises SophgoCallError for a bad number.
    Raises SophgoUnavailableError if there is neither a chip nor an emulator.
    Raises SophgoRuntimeError if the machine has chips, but not this device."""

    def __init__(self, tpu_id: int) -> None:
        self._number = number_of(tpu_id)
        here = chips.find()
        if not here.chips:
            raise SophgoUnavailableError(what="a Sophgo device", reason=here.reason, advice=here.advice)
        self._device: Device | None = open_device(self._number) if here.libsophon is not None else None

    @property
    def device(self) -> Device:
        """The open device that has this number now. The handle keeps it open."""
        self._device = open_device(self._number)
        return self._device

    def get_device_id(self) -> int:
        return self._number

    def get_sn(self) -> str:
        """Return the device's serial number; "" for a device without one, such as an emulated device."""
        return self.device.serial

    def get_target(self) -> str:
        """Return Sophgo's name for the kind of chip, such as "BM1684X"."""
        chip = self.device.chip
        return chips.KINDS[chip].in_bmodels[0] if chip in chips.KINDS else chip
