"""How many prompt tokens a step reads in a given time, after measured steps."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from dlinfer.framework.lmdeploy_ext.stepping import prompt_pace
from dlinfer.framework.lmdeploy_ext.stepping.prompt_pace import FIRST, LEAST, PromptPace


def simulate(
    pace: PromptPace, budget: float, rate: float, *, overhead: float, decoding: float, steps: int
) -> list[float]:
    """Run steps that also decode on a machine that reads ``rate`` tokens a second. Return the seconds of each."""
    seconds = []
    for _ in range(steps):
        pace.note(decoding, 0, decodes=True)
        tokens = pace.tokens(budget, decodes=True)
        seconds.append(decoding + overhead + tokens / rate)
        pace.note(seconds[-1], tokens, decodes=True)
    return seconds


def test_the_first_step_reads_little():
    assert PromptPace().tokens(100.0, decodes=False) == FIRST


@pytest.mark.parametrize("rate", [400.0, 4_000.0, 100_000.0])
def test_steps_come_to_take_the_time_that_they_may(rate):
    last = simulate(PromptPace(), 0.25, rate, overhead=0.01, decoding=0.05, steps=30)[-1]
    assert last == pytest.approx(0.25, rel=0.05)


def test_a_slow_machine_still_reads_prompts():
    pace = PromptPace()
    simulate(pace, 0.25, 10.0, overhead=0.0, decoding=0.3, steps=3)
    assert pace.tokens(0.25, decodes=True) == LEAST


def test_a_step_that_compiled_does_not_count():
    pace = PromptPace()
    pace.note(60.0, 128, decodes=False)
    pace.note(0.128, 128, decodes=False)
    assert pace.tokens(1.0, decodes=False) == 1000


def test_the_pace_follows_the_load():
    pace = PromptPace()
    simulate(pace, 0.25, 4_000.0, overhead=0.0, decoding=0.01, steps=20)
    slow = simulate(pace, 0.25, 1_000.0, overhead=0.0, decoding=0.04, steps=8)
    assert slow[0] > 0.9 and slow[-1] == pytest.approx(0.25, rel=0.05)


def inputs(tokens: int, *, is_decoding: bool = False, is_dummy: bool = False) -> SimpleNamespace:
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return SimpleNamespace(input_ids=ids, is_decoding=is_decoding, is_dummy=is_dummy)


@pytest.mark.parametrize(
    ("of", "decodes", "noted"),
    [
        (None, False, (0, True)),
        (inputs(3, is_decoding=True), False, (0, True)),
        (inputs(7), False, (7, False)),
        (inputs(7), True, (7, True)),
        (inputs(7, is_dummy=True), False, None),
    ],
    ids=["decoding", "first decoding", "prompts", "both", "a rank without work"],
)
def test_a_step_is_timed_as_what_it_does(monkeypatch, of, decodes, noted):
    found = []
    monkeypatch.setattr(
        PromptPace, "note", lambda self, seconds, tokens, *, decodes: found.append((tokens, decodes))
    )

    async def step() -> None:
        pass

    async def main() -> None:
        await prompt_pace.timed(SimpleNamespace(), step, of, decodes=decodes)()

    asyncio.run(main())
    assert found == ([noted] if noted else [])
