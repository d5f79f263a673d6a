"""The card for serving frameworks: its memory, torch.mlu's streams, CNCL."""

from dlinfer.vendor.camb import sdk
from dlinfer.vendor.device import Device, DeviceMemory


class CambDevice(Device):
    communicator = "cncl"
    graph_class = "MLUGraph"
    padding_length = 1  # of 0 the documents of single_query_cached_kv_attn say nothing
    max_batch_size = 256  # as LMDeploy has it for its own camb backend

    def __init__(self) -> None:
        self._mlu = sdk.cards()
        self.streams = self._mlu

    def memory(self) -> DeviceMemory:
        free, total = self._mlu.mem_get_info()
        return DeviceMemory(free, total, "torch.mlu.mem_get_info", shared=False)
