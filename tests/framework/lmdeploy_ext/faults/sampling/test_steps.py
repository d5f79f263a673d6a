"""Sessions that end before a step are forgotten, though the step draws no token."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.sampling.steps import texts_of
from dlinfer.framework.lmdeploy_ext.faults.sampling.texts import START, Rules, Start
from dlinfer.framework.lmdeploy_ext.stepping import step_thread

NOTHING = np.empty(0, np.int64)


class Agent:
    """A model agent of one step, with a text and a grammar for each of two sessions."""

    _is_prefill_input_logprobs = staticmethod(BaseModelAgent._is_prefill_input_logprobs)

    def __init__(self) -> None:
        self.grammars: dict[int, str] = {1: "of the first", 2: "of the second"}
        self.guided_decoding_manager = SimpleNamespace(
            remove_processor=lambda session: self.grammars.pop(session, None)
        )
        start = Start(Rules(repetition=1.2), NOTHING, NOTHING, 0)
        contexts = [{"session_id": session, "seq_id": 0, START: start} for session in (1, 2)]
        texts_of(self).begin(SimpleNamespace(session_ctx=contexts))
        self.sessions_at_step: list[int] = []

    def sessions(self) -> list[int]:
        return [session for session, _ in texts_of(self)._texts]

    async def step(self, inputs: Any, sampling_inputs: Any) -> None:
        self.sessions_at_step = self.sessions()


def prompts(*, scores: bool) -> Any:
    rows = torch.tensor([0, 1]) if scores else None
    return SimpleNamespace(is_dummy=False, is_decoding=False, logits_indices=rows, seq_logit_length=rows)


@pytest.mark.parametrize("has_grammars", [True, False])
@pytest.mark.parametrize("scores", [True, False])
def test_a_step_that_scores_forgets_ended_sessions(
    scores: bool, has_grammars: bool, monkeypatch: pytest.MonkeyPatch
):
    """A step that draws a token leaves that to the draw, which comes after the forward."""
    monkeypatch.setattr(activation, "_active", "cpu")
    monkeypatch.setattr(activation, "is_synchronous", lambda: False)
    agent: Any = Agent()
    if not has_grammars:
        agent.guided_decoding_manager = None
    sampling = SimpleNamespace(session_to_cleanup=[1, 7])
    patched: Any = step_thread._async_step.build(Agent.step)
    asyncio.run(patched(agent, inputs=prompts(scores=scores), sampling_inputs=sampling))
    assert agent.sessions_at_step == ([2] if scores else [1, 2])
    assert list(agent.grammars) == ([2] if scores and has_grammars else [1, 2])
