"""Requests of mixed lengths that arrive together, and what each contender tells of them. The standard library only."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

LENGTHS = (32, 480, 96, 224, 700, 64, 350, 128)
TOKENS = (48, 16, 96, 32, 24, 64, 40, 80)
"""Of prompts and of answers; a request takes its own by its place, so that long and short ones meet in every way."""


def mixed(count: int) -> list[tuple[int, int]]:
    """(tokens of the prompt, tokens of the answer) of each request."""
    return [(LENGTHS[i % len(LENGTHS)], TOKENS[(3 * i + i // 8) % len(TOKENS)]) for i in range(count)]


class Arrivals:
    """Notes when tokens of requests arrive."""

    def __init__(self, count: int) -> None:
        self.begun = time.perf_counter()
        self.first = [0.0] * count
        self.last = [0.0] * count
        self.tokens = [0] * count
        self.gaps: list[float] = []

    def note(self, request: int, tokens: int) -> None:
        """So many new tokens of a request are there now."""
        if tokens <= 0:
            return
        now = time.perf_counter()
        if self.tokens[request] == 0:
            self.first[request] = now - self.begun
        else:
            self.gaps += [(now - self.last[request]) / tokens] * tokens
        self.tokens[request] += tokens
        self.last[request] = now

    def answer(self) -> dict[str, Any]:
        """Seconds until the last token, all tokens, and times to the first token and between tokens, in seconds."""
        seconds = max(self.last) - self.begun
        return {
            "seconds": seconds,
            "tokens": sum(self.tokens),
            "first": percentiles(self.first),
            "gap": percentiles(self.gaps),
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99; NaN if there are no values."""
    if len(values) < 2:
        return dict.fromkeys(("p50", "p90", "p99"), values[0] if values else math.nan)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
