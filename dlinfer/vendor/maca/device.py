"""The card as a ``Device`` for serving frameworks: its memory, its streams (``torch.cuda``) and MCCL.

MCCL is MetaX's communication library. MetaX's build of torch calls it "nccl".
"""

from dlinfer.vendor.device import Device, DeviceMemory
from dlinfer.vendor.maca import sdk


class MacaDevice(Device):
    communicator = "nccl"  # MetaX's MCCL has this name too (vLLM-metax)
    graph_class = "CUDAGraph"
    max_batch_size = 256  # like LMDeploy's own backend of these cards

    def __init__(self) -> None:
        self._cards = sdk.cards()
        self.streams = self._cards

    def memory(self) -> DeviceMemory:
        free, total = self._cards.mem_get_info()
        return DeviceMemory(free, total, "torch.cuda.mem_get_info", shared=False)
