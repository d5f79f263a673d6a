"""Attention of models that decode by block diffusion (SDAR): a token sees its block and all tokens before the block.

A step computes whole blocks of each sequence. All queries of a block see the same keys, so for the attention op each
block is a sequence of its own, without a causal mask, whose keys end with the block.
"""

from typing import Any

import torch

MODEL_TYPES = ("sdar", "sdar_moe")
"""``model_type`` of the models in LMDeploy that decode by block diffusion."""

_PARADIGM = "dllm"


def is_used(model_config: Any) -> bool:
    """Return whether a model decodes by block diffusion. model_config: LMDeploy's ModelConfig."""
    return model_config.model_paradigm == _PARADIGM


def note_blocks(metadata: Any, length: int) -> None:
    """Set the fields ``chunk_...`` of a step's metadata, for attention up to the end of each block.

    metadata: the StepMetadata. length: the number of tokens of a block. Each sequence's new tokens are whole blocks.
    """
    ends, lengths = metadata.cu_seqlens_q_cpu.long(), metadata.kv_seqlens_cpu.long()
    sequence = torch.repeat_interleave(ends.diff() // length)
    new = torch.arange(1, len(sequence) + 1) * length
    metadata.chunk_ends = new
    metadata.chunk_lengths = lengths[sequence] - (ends[1:][sequence] - new)
    table = metadata.block_offsets
    metadata.chunk_blocks = table[sequence.to(table.device)]
