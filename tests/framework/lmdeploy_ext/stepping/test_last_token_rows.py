"""Which steps ask for each sequence's last row alone, and that a compiled forward then gives no other."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.stepping import last_token_rows as last_rows


def step_inputs(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"logits_indices": None, "is_decoding": False, "max_q_seqlen": 9} | fields)


class Agent:
    """A model agent whose forward tells what its model was asked to give."""

    def __init__(
        self, *, drafts: bool = False, compiled: bool = True, paradigm: str = "ar", **more: Any
    ) -> None:
        self.model_config = SimpleNamespace(model_paradigm=paradigm)
        self.spec_agent = SimpleNamespace(is_enabled=lambda: drafts)
        self.patched_model = SimpleNamespace(last_rows_only=False) if compiled else SimpleNamespace()
        vars(self).update(more)

    def ask(self, inputs: Any = None, *, return_logits: bool = False) -> bool | None:
        async def forward(agent: Any, inputs: Any, return_logits: bool, cache_inputs: Any = None) -> Any:
            return getattr(agent.patched_model, "last_rows_only", None)

        step = last_rows._async_model_forward.build(forward)

        async def run() -> Any:
            return await step(self, inputs or step_inputs(), return_logits)

        asked = asyncio.run(run())
        assert not getattr(self.patched_model, "last_rows_only", False)
        return asked


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch):
    monkeypatch.setattr(activation, "_active", "cpu")


def test_a_step_of_next_tokens():
    assert Agent().ask() is True


@pytest.mark.parametrize(
    "agent, asked",
    [
        (Agent(), {"return_logits": True}),
        (Agent(), {"inputs": step_inputs(logits_indices=[0, 3])}),
        (Agent(), {"inputs": step_inputs(is_decoding=True, max_q_seqlen=3)}),
        (Agent(drafts=True), {}),
        (Agent(memdecode_agent=object()), {}),
        (Agent(paradigm="dllm"), {}),
    ],
    ids=[
        "logits of all",
        "scores of the input",
        "drafts",
        "a draft model",
        "a memory decoder",
        "block diffusion",
    ],
)
def test_who_reads_the_other_rows(agent, asked):
    assert agent.ask(**asked) is False


def test_other_devices_are_left_alone(monkeypatch):
    monkeypatch.setattr(activation, "_active", None)
    assert Agent().ask() is False


def test_an_eager_model_gives_what_it_gives():
    assert Agent(compiled=False).ask() is None


def test_a_failing_forward_leaves_no_mark():
    agent = Agent()
    with pytest.raises(ZeroDivisionError), last_rows.giving(agent, True):
        assert agent.patched_model.last_rows_only
        raise ZeroDivisionError
    assert not agent.patched_model.last_rows_only
