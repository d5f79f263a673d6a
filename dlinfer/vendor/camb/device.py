"""The card as a ``Device`` for serving frameworks: its memory, its streams (``torch.mlu``) and CNCL."""

from dlinfer.vendor.camb import sdk
from dlinfer.vendor.device import Device, DeviceMemory


class CambDevice(Device):
    communicator = "cncl"
    graph_class = "MLUGraph"
    padding_length = 1  # single_query_cached_kv_attn documents no length of 0
    max_batch_size = 256  # like LMDeploy's own camb backend

    def __init__(self) -> None:
        self._mlu = sdk.cards()
        self.streams = self._mlu

    def memory(self) -> DeviceMemory:
        free, total = self._mlu.mem_get_info()
        return DeviceMemory(free, total, "torch.mlu.mem_get_info", shared=False)
