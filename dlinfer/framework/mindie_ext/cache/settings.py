"""The number and the size of a KV pool's blocks."""

from dataclasses import dataclass, field

import torch

from dlinfer.errors import MemoryPlanError
from dlinfer.framework.mindie_ext.model.model_info import ModelInfo
from dlinfer.vendor import KVCacheLayout, activate_default

GB = 1 << 30


@dataclass
class KVCacheSettings:
    """The sizes of a KV pool, with the fields of MindIE's class of this name.

    cpu_mem, npu_mem: how many bytes of host memory and of device memory the blocks may take.
    block_size: slots in a block.
    backend_type, is_separated_pd, num_speculative_tokens: these have no effect; callers may read them.
    """

    rank: int
    model_info: ModelInfo
    cpu_mem: int
    npu_mem: int
    block_size: int
    backend_type: str = "atb"
    is_separated_pd: bool = False
    num_speculative_tokens: int | None = None
    num_layers: int = field(init=False)
    num_heads: int = field(init=False)
    """Number of KV heads on this rank."""
    head_size: int = field(init=False)
    k_head_size: int = field(init=False)
    v_head_size: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    num_npu_blocks: int = field(init=False)
    num_cpu_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        info = self.model_info
        self.num_layers, self.num_heads, self.head_size = info.num_layers, info.num_kv_heads, info.head_size
        self.k_head_size = info.k_head_size or info.head_size
        self.v_head_size = info.v_head_size or info.head_size
        self.dtype = info.dtype
        needed = self.layout.block_size
        if needed is not None and self.block_size != needed:
            raise MemoryPlanError(
                asked=f"block_size = {self.block_size}",
                blocks="KV",
                block_bytes=f"{self.cache_block_bytes} bytes",
                available=f"only blocks of {needed} slots",
                limit=f"the layout of {info.device.type}'s vendor",
                advice=f"set block_size to {needed}",
            )
        self.num_npu_blocks = self.npu_mem // self.cache_block_bytes
        self.num_cpu_blocks = self.cpu_mem // self.cache_block_bytes

    @property
    def cache_block_bytes(self) -> int:
        """The size in bytes of one block: the keys and values of all layers."""
        slot = self.num_heads * (self.k_head_size + self.v_head_size) * self.dtype.itemsize
        return self.num_layers * self.block_size * slot

    @property
    def layout(self) -> KVCacheLayout:
        """The KV cache layout of the device's vendor."""
        vendor = activate_default(self.model_info.device.type)
        return vendor.kv_cache_layout if vendor is not None else KVCacheLayout()

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (shape of the keys, shape of the values) of a layer's cache of ``blocks`` blocks, in the vendor's
        layout.
        """
        keys = self.layout.shape(blocks, self.block_size, self.num_heads, self.k_head_size)
        values = self.layout.shape(blocks, self.block_size, self.num_heads, self.v_head_size)
        return keys, values
