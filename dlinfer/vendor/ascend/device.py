"""The card as a ``Device`` for serving frameworks: its memory, its streams (``torch.npu``) and HCCL."""

from dlinfer.vendor.ascend import sdk
from dlinfer.vendor.ascend.captured import CapturedLengths
from dlinfer.vendor.device import Device, DeviceMemory


class AscendDevice(Device):
    communicator = "hccl"
    graph_class = "NPUGraph"
    tensor_parallel = True
    max_batch_size = 256  # like LMDeploy's own Ascend backend

    def __init__(self) -> None:
        self._npu = sdk.cards()
        self.streams = self._npu

    def take(self, index: int) -> None:
        """Make card ``index`` the current one of this process. Device "npu" without an index then means this card."""
        self._npu.set_device(index)

    def memory(self) -> DeviceMemory:
        free, total = self._npu.mem_get_info()
        return DeviceMemory(free, total, "torch.npu.mem_get_info", shared=False)

    def host_numbers(self) -> CapturedLengths:
        return CapturedLengths()
