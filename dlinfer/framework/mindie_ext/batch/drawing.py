"""Collect the sampling parameters of a step's sequences."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dlinfer.framework.mindie_ext.batch.compose import Step
from dlinfer.framework.mindie_ext.batch.input_metadata import InputMetadata
from dlinfer.framework.mindie_ext.batch.request import sampling_record
from dlinfer.framework.mindie_ext.sampling import SamplingMetadata


def metadata_of(
    metadata: InputMetadata,
    step: Step,
    vocab_size: int,
    defaults: Mapping[str, float],
    to_tensor: Callable[[Any], Any],
) -> SamplingMetadata:
    """Return the sampling metadata of the sequences that get a token in this step. Raises SamplingError.

    defaults: the sampling parameters for requests that bring none.
    """
    states = [step.states[index] for index in step.draws]
    ids = metadata.all_sequence_ids[step.draws]
    plain = sampling_record(**defaults)
    records = np.concatenate([plain if state.sampling is None else state.sampling for state in states])
    drawn = SamplingMetadata.from_numpy(
        batch_sequence_ids=[ids[index : index + 1] for index in range(len(ids))],
        reserved_sequence_ids=[np.zeros(0, dtype=np.int64) for _ in states],
        is_prefill=bool(metadata.is_prefill),
        is_mix=bool(metadata.is_mix),
        all_sequence_ids=ids,
        repetition_penalty=records["repetition_penalty"].astype(np.float32),
        frequency_penalty=records["frequency_penalty"].astype(np.float32),
        presence_penalty=records["presence_penalty"].astype(np.float32),
        temperature=records["temperature"].astype(np.float32),
        top_k=records["top_k"].astype(np.int64),
        top_p=records["top_p"].astype(np.float32),
        do_sample=records["do_sample"].astype(np.bool_),
        top_logprobs=records["top_logprobs"].astype(np.int64),
        num_top_tokens=records["top_logprobs"].astype(np.int64),
        seeds=np.asarray([state.seed for state in states], dtype=np.int64),
        to_tensor=to_tensor,
    )
    drawn.update_token_ids(
        _padded([state.tokens for state in states], vocab_size),
        _padded([state.new_tokens for state in states], vocab_size),
    )
    return drawn


def _padded(rows: list[list[int]], padding: int) -> np.ndarray:
    """Return the rows as an array [rows, longest] int64, filled up with ``padding``."""
    result = np.full((len(rows), max(1, *map(len, rows))), padding, dtype=np.int64)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result
