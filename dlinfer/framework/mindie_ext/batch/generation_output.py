"""The output of one step."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np


class FinishReason(IntEnum):
    """Why a sequence ended. The numbers are MindIE's."""

    CONTINUE = 0
    EOS = 1
    STOP_STRINGS = 2
    STOP_TOKEN_IDS = 3
    REACH_MAX_SEQ_LEN = 5
    REACH_MAX_OUTPUT_LEN = 6


@dataclass
class GenerationOutput:
    """The output of a step: arrays over the step's n sequences, in the order of the requests.

    sequence_ids, parent_sequence_ids: [n] int64.
    group_indices: for each request the range (first, end) of its sequences, without ``end``.
    token_ids: [n, 1] int64; -1 for a sequence whose prompt is not yet complete.
    logprobs: [n, 1] float32.
    top_token_ids, top_logprobs: [n, 1, k], where k is the largest number of top tokens that a request wants.
    num_new_tokens: [n] int64, 0 or 1.
    num_top_tokens: [n], how many top tokens each request wants.
    cumulative_logprobs: [n] float32.
    finish_reason: [n] int32, numbers of FinishReason.
    truncation_indices: [n], how many characters the server must cut from the text's end because of a stop string.
    eos_info: [n, 2] int64, finish_reason and num_new_tokens.
    trace_ids: as the server passed them.
    """

    sequence_ids: np.ndarray
    parent_sequence_ids: np.ndarray
    group_indices: list[tuple[int, int]]
    token_ids: np.ndarray
    logprobs: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray
    num_new_tokens: np.ndarray
    num_top_tokens: np.ndarray
    cumulative_logprobs: np.ndarray
    finish_reason: np.ndarray
    truncation_indices: np.ndarray
    eos_info: np.ndarray
    trace_ids: list[Any] | None = None
