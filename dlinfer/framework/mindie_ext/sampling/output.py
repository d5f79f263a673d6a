"""The output of the sampler."""

from dataclasses import dataclass

import numpy as np

NO_LOGPROB = -9999.0
"""MindIE's value for a log-probability that was not requested."""


@dataclass
class SamplingOutput:
    """The sampled tokens, as arrays over n sequences.

    token_ids, num_new_tokens: [n] int64.
    repeating_indices: [n] int64, always 0 to n - 1, because no sequence is repeated.
    logprobs: [n] float32, the log-probabilities of the sampled tokens. NO_LOGPROB if no sequence requests them.
    top_token_ids int64, top_logprobs float32: [n, k], the most likely tokens first. k is the largest number of top
        tokens that a sequence requests.
    num_top_tokens: [n], how many top tokens each sequence requests.
    cumulative_logprobs: [n] float32, always 0.
    seeds: [n] int64, or None if all sequences are greedy.
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
        """Return (token_ids, logprobs), the result in MindIE's deprecated form of ``sample``."""
        return self.token_ids, self.logprobs
