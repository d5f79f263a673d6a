"""Defines the fixed tensors that a captured graph reads. The inputs of a step are copied into them before a replay."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

NO_SLOT = -1
"""The cache slot of a padding row: its keys and values are not written."""


class StepBuffers:
    """The inputs of a decoding step of ``rows`` sequences, with block tables of up to ``blocks`` blocks.

    A smaller batch is filled up with padding rows. Their cache slot is -1, so they write no keys and values. They
    attend to ``padding_length`` keys; 0 means none.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device, padding_length: int = 0) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.rows, self.blocks, self.padding_length = rows, blocks, padding_length
        self.input_ids, self.position_ids = zeros(1, rows), zeros(1, rows)
        self.block_offsets = zeros(rows, blocks, dtype=torch.int32)
        self.kv_seqlens = zeros(rows, dtype=torch.int32)
        self.slots = zeros(rows).fill_(NO_SLOT)
        self._ones = torch.ones(rows, dtype=torch.int32, device=device)
        self._ends = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._ends_on_host = self._ends.cpu()

    def fill(self, inputs: dict[str, Any]) -> None:
        """Copy the inputs of a step into the buffers, and fill the remaining rows and blocks with padding."""
        meta = inputs["attn_metadata"]
        real, (_, wide) = meta.kv_seqlens.shape[0], meta.block_offsets.shape
        for buffer, own, padding in (
            (self.input_ids[0], inputs["input_ids"][0], 0),
            (self.position_ids[0], inputs["position_ids"][0], 0),
            (self.kv_seqlens, meta.kv_seqlens, self.padding_length),
            (self.slots, meta.kv_start_indices.view(-1), NO_SLOT),
        ):
            buffer[:real].copy_(own)
            buffer[real:].fill_(padding)
        self.block_offsets.zero_()
        self.block_offsets[:real, :wide].copy_(meta.block_offsets)

    def inputs(self, step: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for a forward that reads the buffers. step: those of a real step's forward.

        The returned sequence lengths are all on the device, where each replay reads them. A graph would keep lengths on
        the host as constants.
        """
        meta = step["attn_metadata"]
        return step | {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attn_metadata": dataclasses.replace(
                meta,
                block_offsets=self.block_offsets,
                q_start_loc=self._ends[:-1],
                q_seqlens=self._ones,
                kv_seqlens=self.kv_seqlens,
                kv_seqlens_cpu=self.kv_seqlens,
                cu_seqlens_q=self._ends,
                cu_seqlens_q_cpu=self._ends_on_host,
                kv_start_indices=self.slots,
                max_kv_seq_len=self.blocks * meta.block_size,
                kv_flatten_size=self.rows * self.blocks * meta.block_size,
                adapter_ids=None,
                fresh=None,
                past_lengths=None,
            ),
        }
