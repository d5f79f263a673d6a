"""What serving frameworks ask of the device besides kernels."""

from dlinfer.conformance import stand_in
from dlinfer.vendor import Device, DeviceMemory
from dlinfer.vendor.streams import HostStreams


class TheDevice(Device):
    """A card whose calls return when their work is done."""

    communicator = "gloo"
    max_batch_size = 16

    def __init__(self) -> None:
        self.streams = HostStreams()  # or a module like torch.cuda, where the device has queues

    def memory(self) -> DeviceMemory:
        return DeviceMemory(stand_in.free(), stand_in.TOTAL, "the stand-in's own", shared=False)
