"""Sample and stop by block diffusion (SDAR) as each request asks.

LMDeploy gives each token of a block a row of its own in a step. It repeats the options of a batch of requests in the
wrong order of these rows, so requests get each other's options. It overlooks stop words in a block that begins with
the end of the prompt, and in an answer's last block if the answer reaches its length there. If the requests of a batch
have different numbers of stop words, it may end an answer in its first block.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original

_STRATEGIES = "lmdeploy.pytorch.strategies.dllm"
_MODELS = ("sdar", "sdar_moe")
_APART = 1 << 24
"""Distance of the random numbers of neighbouring tokens: more than the steps of an answer."""


@corrects(
    f"{_STRATEGIES}.sampling:DLLMSamplingStrategy.make_sampling_inputs",
    why="repeats the options of a batch in the wrong order, so requests get each other's options. It "
    "draws all tokens of a block with one random number, and forbids stop words for whole blocks beyond min_new_tokens",
    for_models=_MODELS,
)
def _make_sampling_inputs(original: Original, self: Any, seqs: list[Any]) -> Any:
    """Return SamplingInputs with one row for each token of each sequence's block."""
    from lmdeploy.pytorch.strategies.ar.sampling import ARSamplingStrategy

    inputs, length = ARSamplingStrategy.make_sampling_inputs(self, seqs), self.dllm_block_length
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            setattr(inputs, field.name, value.repeat_interleave(length, 0))
    inputs.batch_size *= length
    place = torch.arange(length).repeat(len(seqs))
    inputs.random_offsets += place * _APART
    begin = torch.tensor([seq.num_valid_ids % length for seq in seqs]).repeat_interleave(length)
    inputs.num_ignore_eos -= place - begin
    return inputs


@corrects(
    f"{_STRATEGIES}.model_agent:_check_stopwords_dllm",
    why="overlooks a stop word in an answer's last block if the answer reaches its length there, and takes the padding "
    "of another request's stop words for a stop word",
    for_models=_MODELS,
)
def _check_stop_words(
    original: Original,
    token_ids: Tensor,
    stop_words: Tensor,
    is_unmasked: Tensor,
    stopped: Tensor,
    stop_pos: Tensor,
    num_appendable_ids: Tensor,
    output_start_pos: Tensor,
    inputs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (stopped, stop_pos, num_appendable_ids), each [B], of blocks of B sequences.

    token_ids: [B * length]. stop_words: [B * length, N], padded with -1. is_unmasked: [B], whether all tokens of a
    block are decided. stopped, stop_pos: whether an answer reaches its length, and then the place of its last token.
    output_start_pos: [B], the position of the first token of the answer.
    """
    count = len(num_appendable_ids)
    length = len(token_ids) // count
    begin = inputs.history_lengths + inputs.seq_length - length
    positions = begin[:, None] + torch.arange(length, device=begin.device)
    is_stop = (token_ids[:, None] == stop_words).any(1).view(count, length)
    is_stop &= (positions >= output_start_pos[:, None]) & is_unmasked[:, None]
    ends, place = is_stop.any(1), is_stop.int().argmax(1)
    is_first = ends & (~stopped | (place < stop_pos))
    left = torch.where(ends, num_appendable_ids.clamp_max(0), num_appendable_ids)
    return stopped | ends, torch.where(is_first, place, stop_pos), left


@corrects(
    f"{_STRATEGIES}.sequence:SchedulerSequenceDLLM._update_token_ids_inputs",
    why="takes the end of the prompt's last block for the begin of the answer, so a stop word in that block is "
    "overlooked",
    for_models=_MODELS,
)
def _update_token_ids_inputs(original: Original, self: Any, token_ids: Any, dllm_mask: Any) -> None:
    original(self, token_ids, dllm_mask)
    self.output_start_pos = self.num_valid_ids


@corrects(
    f"{_STRATEGIES}.unmasking:UnmaskingProcessor.low_confidence_dynamic",
    why="decides one token a step where no token is certain enough, whatever dllm_denoising_steps is",
    for_models=_MODELS,
)
def _low_confidence_dynamic(
    original: Original, self: Any, logits: Tensor, token_ids: Tensor, dllm_mask: Tensor
) -> Tensor:
    """Return the mask [tokens] after a step: masked tokens above the threshold are decided, or else the best few.

    At least ``block_length / denoising_steps`` tokens are decided, as in SDAR's published algorithm.
    """
    from lmdeploy.pytorch import consts

    length = self.dllm_config.block_length
    masked = (dllm_mask == consts.DLLM_MASKED).view(-1, length)
    scores = self._get_scores(logits, token_ids).view(-1, length).masked_fill(~masked, -torch.inf)
    least = self._get_denoise_num()
    certain = scores >= self.dllm_config.confidence_threshold
    best = torch.zeros_like(masked).scatter_(1, scores.topk(least, dim=1).indices, True)
    decided = torch.where(certain.sum(1, keepdim=True) >= least, certain, best) & masked
    return dllm_mask.view(-1, length).masked_fill(decided, consts.DLLM_UNMASKED).flatten()
