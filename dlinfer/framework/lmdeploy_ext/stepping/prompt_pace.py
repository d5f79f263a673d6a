"""Measures how fast an engine reads prompts, and sizes the prompts of its next step by time.

A step that reads prompts delays every other request of the engine. How many tokens it can read in a given time depends
on the model, the machine and what else runs there. So each step is timed, and the next one follows the measurement.
"""

import time
from collections import deque
from typing import Any

from dlinfer.framework.lmdeploy_ext.stepping.joined_forward import Step

FIRST = 128
"""Prompt tokens of the first step that reads prompts: little enough for slow machines."""
LEAST = 32
"""Prompt tokens of a step if no time is left for prompts: with fewer, reading the weights would take most of it."""
_KEPT = 4
"""Measured steps. The fastest counts, as a step may also have compiled kernels or waited for other processes."""

_NAME = "dlinfer_prompt_pace"
"""Attribute of a model agent: its PromptPace."""


class PromptPace:
    """The pace of one engine: prompt tokens per second, and the seconds of a step that only decodes."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._decoding: deque[float] = deque(maxlen=_KEPT)

    def note(self, seconds: float, prompt_tokens: int, *, decodes: bool) -> None:
        """Record a step. prompt_tokens: those it read. decodes: whether it also decoded."""
        if prompt_tokens == 0:
            self._decoding.append(seconds)
            return
        of_prompts = seconds - (min(self._decoding, default=0.0) if decodes else 0.0)
        self._rates.append(prompt_tokens / max(of_prompts, seconds / 4))

    def tokens(self, seconds: float, *, decodes: bool) -> int:
        """Return how many prompt tokens a step can read in so many seconds. decodes: whether it also decodes."""
        if not self._rates:
            return FIRST
        left = seconds - (min(self._decoding, default=0.0) if decodes else 0.0)
        return max(LEAST, int(left * max(self._rates)))


def of(agent: Any) -> PromptPace:
    """Return the pace of a model agent, made at first use."""
    pace = getattr(agent, _NAME, None)
    if pace is None:
        pace = PromptPace()
        setattr(agent, _NAME, pace)
    return pace


def timed(agent: Any, step: Step, inputs: Any, *, decodes: bool) -> Step:
    """Return a step that also records its time. inputs: its ModelInputs of prompts, None if it only decodes."""
    if inputs is not None and inputs.is_dummy:
        return step
    tokens = 0 if inputs is None or inputs.is_decoding else inputs.input_ids.numel()

    async def run() -> None:
        start = time.perf_counter()
        await step()
        of(agent).note(time.perf_counter() - start, tokens, decodes=decodes or tokens == 0)

    return run
