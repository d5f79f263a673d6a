"""One forward's inputs as MindIE's backends take them."""

from dataclasses import dataclass

import numpy as np


@dataclass
class ModelInput:
    """Packed tokens of a batch, and where they stand in the KV pool.

    input_ids: [tokens] int64. position_ids: [tokens] int64, or None for 0, 1, ... of each sequence. block_tables:
    [sequences, blocks] int32. slots: [tokens] int32, block * block_size + offset. context_length: [sequences], keys of
    each sequence, the new ones included. max_seq_len: the largest of them. prefill_head_indices: [n], the tokens whose
    logits are wanted, or None: all tokens of a prefill. is_prefill: whether some sequence has more than its last token.
    query_length: [sequences], new tokens of each sequence; None takes context_length for a prefill and 1 else.
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
