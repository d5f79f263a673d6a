"""Attention in float64 by the textbook, one query at a time in numpy: shares no code with the package."""

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One sequence. q: [q_len, heads, size], k: [kv_len, kv_heads, size], v: [kv_len, kv_heads, size_v]."""
    q_len, heads, _ = q.shape
    kv_len, kv_heads, size_v = v.shape
    out = np.zeros((q_len, heads, size_v))
    for i in range(q_len):
        here = kv_len - q_len + i
        for head in range(heads):
            weights = {}
            for there in range(kv_len):
                if causal and there > here:
                    continue
                if window[0] >= 0 and here - there > window[0]:
                    continue
                if window[1] >= 0 and there - here > window[1]:
                    continue
                score = scale * float(np.dot(q[i, head], k[there, head * kv_heads // heads]))
                if softcap > 0:
                    score = softcap * np.tanh(score / softcap)
                if slopes is not None:
                    score -= slopes[head] * abs(here - there)
                weights[there] = np.exp(score)
            total = sum(weights.values()) + (np.exp(sinks[head]) if sinks is not None else 0.0)
            for there, weight in weights.items():
                out[i, head] += weight / total * v[there, head * kv_heads // heads]
    return out
