"""sail.Handle: a device by its number."""

from dlinfer.vendor.sophgo.errors import SophgoUnavailableError
from dlinfer.vendor.sophgo.runtime import chips
from dlinfer.vendor.sophgo.runtime.device import Device, number_of, open_device


class Handle:
    """A device. Programs make handles before engines; where chips are emulated, what a device is shows with the first
    bmodel on it, so a handle is the number, and the device is looked up when it is needed.

    tpu_id: the device's number. Raises SophgoCallError for a number that is none, SophgoUnavailableError where there
    is neither a chip nor an emulator, and SophgoRuntimeError where the machine's chips have no such device.
    """

    def __init__(self, tpu_id: int) -> None:
        self._number = number_of(tpu_id)
        found = chips.find()
        if not found.chips:
            raise SophgoUnavailableError(what="a Sophgo device", reason=found.reason, advice=found.advice)
        self._device: Device | None = open_device(self._number) if found.libsophon is not None else None

    @property
    def device(self) -> Device:
        """The device as it is now; this handle keeps it open."""
        self._device = open_device(self._number)
        return self._device

    def get_device_id(self) -> int:
        """Return the device's number."""
        return self._number

    def get_sn(self) -> str:
        """Return the device's serial number; empty where it has none, as an emulated one."""
        return self.device.serial

    def get_target(self) -> str:
        """Return the kind of chip: "BM1684X", "BM1688"."""
        chip = self.device.chip
        return chips.KINDS[chip].in_bmodels[0] if chip in chips.KINDS else chip
