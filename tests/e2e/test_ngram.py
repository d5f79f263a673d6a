"""Drafts that are looked up in a text change no token of it, in float32, whatever they are worth."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import test_speculation
from tests.e2e.harness import EngineRun, Lab
from tests.e2e.test_speculation import PROMPTS, rule_steps

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

MOST = 5
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST}
GREEDY = {"max_new_tokens": 48, "ignore_eos": True}


@contextmanager
def quoting(lab: Lab, strength: float) -> Iterator[tuple[Path, list[list[int]], list[list[int]]]]:
    """(a model, prompts, what the model says to the prompts of test_speculation).

    Each prompt has the beginning of what the model says, and then the first tokens of the same text again.
    """
    with test_speculation.made(lab, "eagle", strength) as (target, _, said):
        prompts = [[*prompt, *tokens, *prompt] for prompt, tokens in zip(PROMPTS, said, strict=True)]
        yield target, prompts, said


def step(prompts: list[list[int]], **gen: Any) -> dict[str, Any]:
    return {"name": "all", "kind": "token_ids_of", "prompts": prompts, "gen": GREEDY | gen}


def rate(answer: EngineRun) -> float:
    counted = answer.results["looked up"]
    return counted["accepted"] / max(counted["drafted"], 1)


OPTIONS = {"dtype": "float32", "eager_mode": True, "block_size": 16, "session_len": 512}


@pytest.mark.parametrize("strength", [0.05, 0.2, 0.6])
def test_whatever_the_drafts_are_worth(lab: Lab, strength: float):
    with quoting(lab, strength) as (target, prompts, _):
        alone = lab.engine(target, [step(prompts)], **OPTIONS)
        drafted = lab.engine(target, [step(prompts)], **OPTIONS, speculative=NGRAM)
        assert drafted.tokens("all") == alone.tokens("all")
        assert drafted.results["looked up"]["drafted"] > 0
        if strength == 0.05:
            assert rate(drafted) > 0.9


def test_in_graph_mode_without_another_graph(lab: Lab):
    with quoting(lab, 0.2) as (target, prompts, _):
        options = {"dtype": "float32", "block_size": 16, "session_len": 512}
        alone = lab.engine(target, [step(prompts)], **options)
        drafted = lab.engine(target, [step(prompts)], **options, speculative=NGRAM)
        assert drafted.tokens("all") == alone.tokens("all")
        assert drafted.results["looked up"]["accepted"] > 0
        assert drafted.results["graphs"]["late"] == 0
        phases = [phase for phase, outcome, _ in drafted.results["graphs"]["phases"] if outcome != "eager"]
        assert phases == [phase for phase, _, _ in alone.results["graphs"]["phases"]]


@pytest.mark.parametrize("blocks", [0, 56])
def test_rules_that_read_the_text(lab: Lab, blocks: int):
    """As without drafts: also in chunks, with shared blocks, and where a text that lost its blocks starts anew."""
    with quoting(lab, 0.2) as (target, prompts, said):
        steps = [one | {"prompts": prompts} for one in rule_steps(said, lab.tokenizer(target))]
        options = OPTIONS | {"max_prefill_token_num": 32, "enable_prefix_caching": True}
        alone = lab.engine(target, steps, **OPTIONS)
        drafted = lab.engine(target, steps, **options, num_gpu_blocks=blocks, speculative=NGRAM)
        for one in steps:
            assert drafted.tokens(one["name"]) == alone.tokens(one["name"]), one["name"]
        assert drafted.results["looked up"]["accepted"] > 0
        assert blocks == 0 or sum(drafted.results["preemptions"].values()) > 0
