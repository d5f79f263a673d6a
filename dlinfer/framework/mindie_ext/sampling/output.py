"""The tokens that were chosen."""

from dataclasses import dataclass

import numpy as np

NO_LOGPROB = -9999.0
"""MindIE's log-probability where none was asked for."""


@dataclass
class SamplingOutput:
    """Arrays over sequences.

    token_ids, num_new_tokens, repeating_indices: [n] int64. logprobs: [n] float32, of chosen tokens, NO_LOGPROB where
    no log-probabilities were asked for. top_token_ids int64, top_logprobs float32: [n, most], the most likely tokens
    first; most is the largest number that a sequence asks for, num_top_tokens [n] what each asks for.
    cumulative_logprobs: [n] float32 zeros, for callers that sum. seeds: [n] int64, or None where nothing was drawn.
    """

    sequence_ids: np.ndarray | None
    parent_sequence_ids: np.ndarray | None
    group_indices: list[tuple[int, int]]
    repeating_indices: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray
    cumulative_logprobs: np.ndarray
    num_new_tokens: np.ndarray
    num_top_tokens: np.ndarray | None = None
    seeds: np.ndarray | None = None

    def to_deprecated(self) -> tuple[np.ndarray, np.ndarray]:
        """(token_ids, logprobs), which is what SamplingData and SamplingParam give."""
        return self.token_ids, self.logprobs
