"""The card for serving frameworks: its memory, torch.cuda's streams, NCCL's name."""

from dlinfer.vendor.device import Device, DeviceMemory
from dlinfer.vendor.maca import sdk


class MacaDevice(Device):
    communicator = "nccl"  # MetaX's MCCL answers to it, as vLLM-metax has it
    graph_class = "CUDAGraph"
    max_batch_size = 256  # as LMDeploy has it for its own backend of these cards

    def __init__(self) -> None:
        self._cards = sdk.cards()
        self.streams = self._cards

    def memory(self) -> DeviceMemory:
        free, total = self._cards.mem_get_info()
        return DeviceMemory(free, total, "torch.cuda.mem_get_info", shared=False)
