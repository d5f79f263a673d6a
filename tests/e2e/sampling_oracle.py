"""LMDeploy's sampling rules, computed again from HF's logits in float64.

Order and edges follow ``lmdeploy/pytorch/engine/logits_process.py``: stop words are masked when they are
ignored, then temperature, then on the sorted scores top-k, top-p and min-p, each on the distribution that the
one before left; top-p keeps a token while the mass before it is at most p, min-p drops what is below p times
the best.
"""

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64; -inf stays -inf."""
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def distribution(
    logits: np.ndarray,
    masked: list[int],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    slack: float = 0.0,
) -> np.ndarray:
    """Probability of each token, float64[vocab], for one step's logits [vocab].

    Args:
        masked: tokens that may never be chosen.
        top_k: 0 keeps all.
        slack: how far top_p and min_p are opened, so that a token on the very edge is not judged by rounding.
    """
    scores = logits.astype(np.float64) / temperature
    scores[masked] = -np.inf
    order = np.argsort(-scores, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    probabilities = np.exp(log_softmax(scores[order]))
    if top_p < 1.0:
        before = probabilities.cumsum() - probabilities
        order = order[(before <= top_p + slack) | (np.arange(len(order)) == 0)]
        probabilities = np.exp(log_softmax(scores[order]))
    if min_p > 0.0:
        order = order[probabilities >= min_p * probabilities[0] * (1 - slack)]
        probabilities = np.exp(log_softmax(scores[order]))
    full = np.zeros(len(logits))
    full[order] = probabilities
    return full


def penalised(logits: np.ndarray, tokens: list[int], penalty: float) -> np.ndarray:
    """Repetition penalty: positive logits of ``tokens`` divided by it, negative ones multiplied."""
    scores = logits.astype(np.float64)
    seen = list(set(tokens))
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    return scores


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic of observed counts against expected probabilities (both over the same tokens)."""
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())
