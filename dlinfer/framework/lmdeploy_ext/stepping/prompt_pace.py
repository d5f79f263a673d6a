"""Measures how fast an engine prefills, and computes from it how many prompt tokens the next step may have.

A step that prefills delays every other request of the engine. The number of tokens that it can prefill in a given time
depends on the model, the machine and other processes. So each step is timed, and the measurements set the size of the
next step.
"""

import time
from collections import deque
from typing import Any

from dlinfer.framework.lmdeploy_ext.stepping.joined_forward import Step

FIRST = 128
"""Prompt tokens of the first prefill, before any measurement: few enough for slow machines."""
LEAST = 32
"""The fewest prompt tokens of a prefill. With fewer, most of the time would go into reading the weights."""
_KEPT = 4
"""The number of measurements to keep. The fastest counts, since others may include compilation or interruptions."""

_NAME = "dlinfer_prompt_pace"
"""Attribute of a model agent that holds its PromptPace."""


class PromptPace:
    """The pace of one engine: prompt tokens per second, and seconds of a step that only decodes."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._decoding: deque[float] = deque(maxlen=_KEPT)

    def note(self, seconds: float, prompt_tokens: int, *, decodes: bool) -> None:
        """Record a step. prompt_tokens: the number of tokens that it prefilled. decodes: whether it also decoded."""
        if prompt_tokens == 0:
            self._decoding.append(seconds)
            return
        of_prompts = seconds - (min(self._decoding, default=0.0) if decodes else 0.0)
        self._rates.append(prompt_tokens / max(of_prompts, seconds / 4))

    def tokens(self, seconds: float, *, decodes: bool) -> int:
        """Return how many prompt tokens a step can prefill in ``seconds``. decodes: whether the step decodes too."""
        if not self._rates:
            return FIRST
        left = seconds - (min(self._decoding, default=0.0) if decodes else 0.0)
        return max(LEAST, int(left * max(self._rates)))


def of(agent: Any) -> PromptPace:
    """Return the PromptPace of a model agent, which the first call creates."""
    pace = getattr(agent, _NAME, None)
    if pace is None:
        pace = PromptPace()
        setattr(agent, _NAME, pace)
    return pace


def timed(agent: Any, step: Step, inputs: Any, *, decodes: bool) -> Step:
    """Return a step that also records its own time.

    inputs: ModelInputs of the step's prompts; None if it only decodes. decodes: whether the step decodes too.
    """
    if inputs is not None and inputs.is_dummy:
        return step
    tokens = 0 if inputs is None or inputs.is_decoding else inputs.input_ids.numel()

    async def run() -> None:
        start = time.perf_counter()
        await step()
        of(agent).note(time.perf_counter() - start, tokens, decodes=decodes or tokens == 0)

    return run
