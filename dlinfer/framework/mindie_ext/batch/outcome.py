"""Convert sampled tokens to the output of a step."""

from typing import Any

import numpy as np

from dlinfer.framework.mindie_ext.batch.compose import Step
from dlinfer.framework.mindie_ext.batch.generation_output import GenerationOutput
from dlinfer.framework.mindie_ext.batch.input_metadata import InputMetadata
from dlinfer.framework.mindie_ext.batch.stopping import why_finished
from dlinfer.framework.mindie_ext.sampling import SamplingOutput

_NO_LOGPROB = -9999.0
"""MindIE's value for a log-probability that was not requested."""


def outcome(
    metadata: InputMetadata,
    step: Step,
    sampled: SamplingOutput | None,
    eos_token_ids: frozenset[int],
    max_seq_len: int,
    tokenizer: Any,
) -> GenerationOutput:
    """Return the step's output, and append the sampled tokens to the states of the step's sequences."""
    count = len(step.states)
    token_ids = np.full((count, 1), -1, dtype=np.int64)
    logprobs = np.full((count, 1), _NO_LOGPROB, dtype=np.float32)
    most = 0 if sampled is None else sampled.top_token_ids.shape[-1]
    top_token_ids = np.full((count, 1, most), -1, dtype=np.int64)
    top_logprobs = np.full((count, 1, most), _NO_LOGPROB, dtype=np.float32)
    num_top_tokens = np.zeros(count, dtype=np.int64)
    if sampled is not None:
        token_ids[step.draws, 0] = sampled.token_ids
        logprobs[step.draws, 0] = sampled.logprobs
        top_token_ids[step.draws, 0] = sampled.top_token_ids
        top_logprobs[step.draws, 0] = sampled.top_logprobs
        num_top_tokens[step.draws] = 0 if sampled.num_top_tokens is None else sampled.num_top_tokens
    finish_reason = np.zeros(count, dtype=np.int32)
    truncation = np.zeros(count, dtype=np.int64)
    cumulative = np.zeros(count, dtype=np.float32)
    for index, state in enumerate(step.states):
        state.kv_length = int(step.model_input.context_length[index])
    for index in step.draws:
        state = step.states[index]
        if state.prompt_length is None:
            state.prompt_length = len(state.tokens)
        state.tokens.append(int(token_ids[index, 0]))
        state.new_tokens.append(int(token_ids[index, 0]))
        if logprobs[index, 0] != _NO_LOGPROB:
            state.cumulative_logprob += float(logprobs[index, 0])
        cumulative[index] = state.cumulative_logprob
    for index in step.draws:
        reason, characters = why_finished(step.states[index], eos_token_ids, max_seq_len, tokenizer)
        finish_reason[index], truncation[index] = reason, characters
    num_new_tokens = (token_ids[:, 0] >= 0).astype(np.int64)
    return GenerationOutput(
        sequence_ids=metadata.all_sequence_ids.copy(),
        parent_sequence_ids=metadata.all_sequence_ids.copy(),
        group_indices=[(index, index + 1) for index in range(count)],
        token_ids=token_ids,
        logprobs=logprobs,
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
        num_new_tokens=num_new_tokens,
        num_top_tokens=num_top_tokens,
        cumulative_logprobs=cumulative,
        finish_reason=finish_reason,
        truncation_indices=truncation,
        eos_info=np.stack([finish_reason.astype(np.int64), num_new_tokens], axis=1),
        trace_ids=metadata.trace_ids,
    )
