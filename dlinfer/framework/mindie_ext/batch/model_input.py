"""The inputs of one forward, as MindIE's backends take them."""

from dataclasses import dataclass

import numpy as np


@dataclass
class ModelInput:
    """The packed tokens of a batch, and their places in the KV pool.

    input_ids: [tokens] int64.
    position_ids: [tokens] int64. None means that the positions of each sequence count from 0.
    block_tables: [sequences, blocks] int32.
    slots: [tokens] int32, block * block_size + offset.
    context_length: [sequences], the number of keys of each sequence, new keys included.
    max_seq_len: the largest context_length.
    prefill_head_indices: [n], the tokens whose logits to return. None means all tokens of a prefill.
    is_prefill: whether any sequence has more than one new token.
    query_length: [sequences], the number of new tokens of each sequence. None means context_length in a prefill, and 1
        in a decode.
    adapter_ids: the adapter of each sequence, or None.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray | None
    block_tables: np.ndarray
    slots: np.ndarray
    context_length: np.ndarray
    max_seq_len: int
    prefill_head_indices: np.ndarray | None
    is_prefill: bool
    query_length: np.ndarray | None = None
    adapter_ids: list[str | None] | None = None
