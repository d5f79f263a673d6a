"""Drafts that are looked up in a text change no token of it, in float32, whatever they are worth."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models.families import BRIEF, FAMILIES
from examples.tiny_models.vision_families import VISION
from tests.e2e import matrix, test_adapters, test_speculation
from tests.e2e.harness import EngineRun, Lab
from tests.e2e.test_speculation import PROMPTS, rule_steps
from tests.e2e.test_vision import chats_of
from tests.e2e.vision_chats import as_openai

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
        steps: list[dict[str, Any]] = [
            one | {"prompts": prompts} for one in rule_steps(said, lab.tokenizer(target))
        ]
        options = OPTIONS | {"max_prefill_token_num": 32, "enable_prefix_caching": True}
        alone = lab.engine(target, steps, **OPTIONS)
        drafted = lab.engine(target, steps, **options, num_gpu_blocks=blocks, speculative=NGRAM)
        for one in steps:
            assert drafted.tokens(one["name"]) == alone.tokens(one["name"]), one["name"]
        assert drafted.results["looked up"]["accepted"] > 0
        assert blocks == 0 or sum(drafted.results["preemptions"].values()) > 0


LEAST = {"DLINFER_PROMPT_LOOKUP_MIN": "1"}
"""Environment in which a text has a match at nearly every step."""


def alone_and_drafted(
    lab: Lab,
    model: Path,
    steps: list[dict[str, Any]],
    environment: dict[str, str] | None = None,
    **options: Any,
) -> tuple[EngineRun, EngineRun]:
    """What an engine says without drafts and with."""
    starts = [(model, steps, OPTIONS | options | drafts) for drafts in ({}, {"speculative": NGRAM})]
    alone, drafted = lab.engines(starts, environment=environment)
    return alone, drafted


def quotes(prompts: list[list[int]], said: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *tokens, *prompt] for prompt, tokens in zip(prompts, said, strict=True)]


def test_stops_of_several_tokens_and_logprobs(lab: Lab):
    """An answer ends inside a step's tokens, in the same text as without drafts."""
    with quoting(lab, 0.05) as (target, prompts, _):
        tokenizer = lab.tokenizer(target)
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        free = {"name": "free", "kind": "call", "prompts": texts, "gen": GREEDY | {"logprobs": 3}}
        first = lab.engine(target, [free], **OPTIONS)
        said = [answer["token_ids"] for answer in first["free"]]
        words = [
            tokenizer.decode(tokens[at : at + size]) for tokens in said for at, size in ((11, 3), (20, 1))
        ]
        gen = GREEDY | {"stop_words": [word for word in words if word and "\ufffd" not in word]}
        ids = GREEDY | {"ignore_eos": False, "stop_token_ids": [tokens[17] for tokens in said]}
        steps = [
            free,
            {"name": "words", "kind": "call", "prompts": texts, "gen": gen},
            {"name": "streamed", "kind": "stream", "prompts": texts, "gen": gen},
            {"name": "ids", "kind": "call", "prompts": texts, "gen": ids},
        ]
        alone, drafted = alone_and_drafted(lab, target, steps, logprobs_mode="raw_logprobs")
        assert drafted.results["looked up"]["accepted"] > 0
        for one in steps:
            for mine, wanted in zip(drafted[one["name"]], alone[one["name"]], strict=True):
                for field in ("text", "token_ids", "finish_reason", "generate_token_len"):
                    assert mine[field] == wanted[field], (one["name"], field)
        assert {answer["finish_reason"] for answer in alone["words"]} == {"stop"}
        for mine, wanted in zip(drafted["free"], alone["free"], strict=True):
            assert len(mine["logprobs"]) == len(mine["token_ids"])
            for one, other in zip(mine["logprobs"], wanted["logprobs"], strict=True):
                assert [token for token, _ in one] == [token for token, _ in other]
                assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=1e-4)


def test_requests_that_come_and_go(lab: Lab):
    """Prompts that share a forward with a decoding step, and cancelled requests, between steps with drafts."""
    with quoting(lab, 0.2) as (target, prompts, _):
        tokenizer = lab.tokenizer(target)
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        steps = [
            {"name": "staggered", "kind": "staggered", "prompts": texts, "gen": GREEDY, "after": 5},
            {"name": "again", "kind": "one_by_one", "prompts": texts, "gen": GREEDY},
        ]
        cancelled = {"kind": "cancel", "prompts": texts, "gen": GREEDY, "cancel": [0, 3], "after": 9}
        alone = lab.engine(target, steps, **OPTIONS)
        asked = [steps[0], cancelled | {"name": "cancelled"}, steps[1]]
        drafted = lab.engine(target, asked, **OPTIONS, speculative=NGRAM)
        for one in steps:
            assert drafted.tokens(one["name"]) == alone.tokens(one["name"]), one["name"]
        for number, tokens in enumerate(drafted.tokens("cancelled")):
            wanted = alone.tokens("again")[number]
            assert tokens == (wanted[: len(tokens)] if number in (0, 3) else wanted)


def test_text_that_does_not_repeat_is_left_alone(lab: Lab):
    """Nearly every step has a match, of a single token, and hardly any draft is right."""
    drawn = {
        "max_new_tokens": 250,
        "ignore_eos": True,
        "do_sample": True,
        "temperature": 2.0,
        "random_seed": 3,
    }
    steps = [step(PROMPTS[:3], **drawn, top_k=0)]
    alone, drafted = alone_and_drafted(lab, lab.model("llama"), steps, LEAST)
    assert drafted.tokens("all") == alone.tokens("all")
    assert 0 < drafted.results["looked up"]["drafted"] < 0.2 * 250 * 3


def test_adapters_of_one_batch(lab: Lab):
    with test_adapters.made(lab, "llama") as case:
        names = ["", "wide", "narrow"]
        prompts = [quotes(test_adapters.PROMPTS, case.said[name]) for name in names]
        asked = step([prompt for of_one in prompts for prompt in of_one])
        asked["adapters"] = [name or None for name in names for _ in test_adapters.PROMPTS]
        alone, drafted = alone_and_drafted(lab, case.model, [asked], LEAST, adapters=case.adapters)
        assert drafted.tokens("all") == alone.tokens("all")
        assert drafted.results["looked up"]["accepted"] > 0


REFUSED = (
    *("llama_dynamic", "phi3_longrope", "internlm3", "phi4_longrope", "phimoe_longrope", "minicpm3_longrope"),
    *("internvl_chat_internlm2", "qwen3_next"),
)
"""Families whose frequencies depend on the length, or whose layers keep a state."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "qwen2_vl" else pytest.mark.full)
        for name in VISION
        if name not in REFUSED
    ],
)
def test_answers_to_images(lab: Lab, family: str):
    asked = [as_openai(chat) for chat in chats_of(family)]
    steps = [{"name": "all", "kind": "call", "prompts": asked, "chat": True, "gen": GREEDY}]
    options = {"session_len": 2048} if family == "cogvlm" else {}
    alone, drafted = alone_and_drafted(lab, lab.model(family), steps, LEAST, **options)
    assert drafted.tokens("all") == alone.tokens("all")
    assert drafted.results["looked up"]["drafted"] > 0


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name in (*FAMILIES, *BRIEF) if name not in REFUSED])
def test_every_family(lab: Lab, family: str):
    model = lab.model(family, matrix.POSITION_SEEDS.get(family, 0))
    said = lab.engine(model, [step(PROMPTS)], **OPTIONS, environment=LEAST).tokens("all")
    alone, drafted = alone_and_drafted(lab, model, [step(quotes(PROMPTS, said))], LEAST)
    assert drafted.tokens("all") == alone.tokens("all")
    assert drafted.results["looked up"]["drafted"] > 0
