"""The default memory of a KV pool."""

from typing import Any

from dlinfer.framework.mindie_ext.model.model_info import ModelInfo
from dlinfer.vendor import discovery

_SHARE_OF_HOST, _SHARE_OF_CARD = 0.3, 0.9
"""The share of the free memory that a KV pool takes by default.

It is small on the host, where other processes need memory too.
"""


def memory_of_blocks(config: Any, info: ModelInfo, max_seq_len: int) -> int:
    """Return a pool's size in bytes: enough for max_batch_size sequences of max_seq_len tokens.

    The size is at most a fixed share of the free memory. Without a max_batch_size, the default of the device applies.
    """
    slot = info.num_kv_heads * ((info.k_head_size or info.head_size) + (info.v_head_size or info.head_size))
    block = info.num_layers * config.block_size * slot * info.data_byte_size
    memory = discovery.device(info.device.type)
    sequences = config.max_batch_size or memory.max_batch_size
    needed = sequences * -(-max_seq_len // config.block_size) * block
    now = memory.memory()
    return min(needed, int(now.available * (_SHARE_OF_HOST if now.shared else _SHARE_OF_CARD)))
