"""Apply penalties, top_k and top_p to logits before a token is selected."""

import numpy as np
import torch
from torch import Tensor

from dlinfer.framework.mindie_ext.sampling.metadata import SamplingMetadata


def penalised(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return float32 logits with the penalties applied. ``logits`` is not mutated.

    logits: [sequences, vocabulary]. The repetition penalty is for tokens of the prompt and the answer: it divides
    positive logits and multiplies negative logits (Keskar et al., 2019, arXiv:1909.05858). The other two penalties are
    for tokens of the answer: the frequency penalty is subtracted once for each occurrence, the presence penalty only
    once.
    """
    wide = logits.float()
    repetition = _column(metadata.repetition_penalty, 1.0)
    if repetition is not None and metadata.all_token_ids is not None:
        there = _counts(metadata.all_token_ids, wide.shape[1]) > 0
        wide = torch.where(there, torch.where(wide < 0, wide * repetition, wide / repetition), wide)
    frequency, presence = _column(metadata.frequency_penalty, 0.0), _column(metadata.presence_penalty, 0.0)
    if metadata.output_token_ids is not None and (frequency is not None or presence is not None):
        counts = _counts(metadata.output_token_ids, wide.shape[1])
        if frequency is not None:
            wide = wide - frequency * counts
        if presence is not None:
            wide = wide - presence * (counts > 0)
    return wide


def _column(values: np.ndarray | None, neutral: float) -> Tensor | None:
    """Return the values of a penalty as [sequences, 1] float32, or None if all values are ``neutral``."""
    if values is None or bool((values == neutral).all()):
        return None
    return torch.from_numpy(values.astype(np.float32))[:, None]


def _counts(token_ids: np.ndarray, vocabulary: int) -> Tensor:
    """Return how often each token occurs in each row of token_ids, [rows, vocabulary] float32.

    Padding is not counted.
    """
    ids = torch.from_numpy(token_ids)
    outside = (ids < 0) | (ids >= vocabulary)
    counts = torch.zeros(len(ids), vocabulary + 1)
    counts.scatter_add_(1, ids.masked_fill(outside, vocabulary), torch.ones(ids.shape))
    return counts[:, :vocabulary]


def candidates(row: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return (logits, token ids) of the tokens that top_k and top_p keep, the most likely first.

    row: [vocabulary] float32.
    top_k: keep this many tokens, and all tokens that are as likely as the last of these. 0 keeps all.
    top_p: of the tokens that top_k keeps, keep the fewest whose probabilities add up to at least top_p. 1 keeps all
        (Holtzman et al., 2020, arXiv:1904.09751).
    """
    ordered, ids = torch.sort(row, descending=True, stable=True)
    if 0 < top_k < len(row):
        count = int((ordered >= ordered[top_k - 1]).sum())
        ordered, ids = ordered[:count], ids[:count]
    if top_p < 1:
        probabilities = ordered.softmax(0)
        before = probabilities.cumsum(0) - probabilities
        count = max(1, int((before < top_p).sum()))
        ordered, ids = ordered[:count], ids[:count]
    return ordered, ids
