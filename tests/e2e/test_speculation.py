"""Speculative decoding says what transformers says with the target alone, in float32, whatever the drafts are worth."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models.families import STOP_IDS
from tests.e2e.harness import EngineRun, Lab
from tests.e2e.vision_chats import CHATS, as_openai

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 60)), [100, 200, 300], [77, 78], list(range(300, 420))]
NEW = 32
DRAFTED = 3
# method -> how strong layers are: where the drafts are right nearly always, now and then, and nearly never
STRENGTHS = {
    "eagle": (0.05, 0.2, 0.6),
    "eagle3": (0.05, 0.2, 0.6),
    "deepseek_mtp": (0.1, 0.3, 3.0),
    "qwen3_5_mtp": (0.1, 0.3, 3.0),
}
OWN_LAYERS = ("deepseek_mtp", "qwen3_5_mtp")
ALL_GRAPHS = ("eagle", "qwen3_5_mtp")
GREEDY = {"max_new_tokens": NEW, "ignore_eos": True}
STEP = {"name": "all", "kind": "token_ids_of", "prompts": PROMPTS, "gen": GREEDY}


@contextmanager
def made(
    lab: Lab, method: str, strength: float, **more: Any
) -> Iterator[tuple[Path, dict[str, Any], list[list[int]]]]:
    """(target, speculative_config, what transformers says)."""
    with tempfile.TemporaryDirectory(prefix="dlinfer-drafts-") as temp:
        job = {"out": temp, "method": method, "strength": strength, "prompts": PROMPTS, "new": NEW}
        job |= {"never": STOP_IDS, **more}
        lab.ask("tests.e2e.draft_job", job, 600, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
        draft = "" if method in OWN_LAYERS else f"{temp}/draft"
        speculative = {"method": method, "model": draft, "num_speculative_tokens": DRAFTED}
        yield Path(temp, "target"), speculative, json.loads(Path(temp, "said.json").read_text())


def run(lab: Lab, target: Path, speculative: dict[str, Any], **options: Any) -> EngineRun:
    return lab.engine(target, [STEP], dtype="float32", speculative=speculative, **options)


def accepted(answer: EngineRun) -> list[list[int]]:
    """How many drafts of each sequence of each step were right."""
    return answer.results["accepted"]


def rate(answer: EngineRun) -> float:
    counts = [count for step in accepted(answer) for count in step]
    return sum(counts) / (DRAFTED * len(counts))


def test_drafts_that_are_right_now_and_then_in_one_batch(lab: Lab):
    with made(lab, "eagle3", 0.2) as (target, speculative, said):
        answer = run(lab, target, speculative, eager_mode=True)
        assert answer.tokens("all") == said
        assert any(len(set(step)) > 1 for step in accepted(answer)), "some of a step's drafts were right"


@pytest.mark.full
@pytest.mark.parametrize("method", STRENGTHS)
def test_whatever_the_drafts_are_worth(method: str, lab: Lab):
    rates = []
    for strength in STRENGTHS[method]:
        with made(lab, method, strength) as (target, speculative, said):
            answer = run(lab, target, speculative, eager_mode=True)
            assert answer.tokens("all") == said
            rates.append(rate(answer))
    good, _, bad = rates
    assert rates == sorted(rates, reverse=True)
    assert good > (0.15 if method == "eagle3" else 0.9), rates
    assert bad < 0.05, rates


@pytest.mark.full
@pytest.mark.parametrize("method", STRENGTHS)
def test_in_graph_mode_and_with_chunks_and_shared_blocks(method: str, lab: Lab):
    """What cannot be a graph, as a forward that gives two tensors, runs eagerly and is counted."""
    with made(lab, method, STRENGTHS[method][1]) as (target, speculative, said):
        graphs = run(lab, target, speculative)
        assert graphs.tokens("all") == said
        assert graphs.results["graphs"]["late"] == 0
        outcomes = [outcome for _, outcome, _ in graphs.results["graphs"]["phases"]]
        assert ("eager" in outcomes) == (method not in ALL_GRAPHS), outcomes
        assert set(outcomes) - {"eager"}
        shares = method != "qwen3_5_mtp"
        split = {"max_prefill_token_num": 32, "enable_prefix_caching": shares, "eager_mode": True}
        assert run(lab, target, speculative, **split).tokens("all") == said


@pytest.mark.parametrize(("experts", "drafted"), [(False, 1), (False, 3), (True, 3)])
def test_layers_of_linear_attention_forget_drafts_that_are_wrong(lab: Lab, experts: bool, drafted: int):
    """As many sequences as the engine has slots for, and more: each slot serves several, one after the other."""
    with made(lab, "qwen3_5_mtp", 0.3, experts=experts) as (target, speculative, said):
        speculative["num_speculative_tokens"] = drafted
        again = [*PROMPTS[::-1], *PROMPTS]
        steps = [STEP, {**STEP, "name": "again", "prompts": again}]
        options = {"dtype": "float32", "eager_mode": True, "max_batch_size": 4, "max_prefill_token_num": 32}
        answer = lab.engine(target, steps, speculative=speculative, **options)
        assert answer.tokens("all") == said
        assert answer.tokens("again") == [*said[::-1], *said]
        counts = {count for step in accepted(answer) for count in step}
        assert {0, drafted} <= counts <= set(range(drafted + 1)), (
            "some drafts were right, and some were wrong"
        )


@pytest.mark.full
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_images_beside_drafts(lab: Lab, experts: bool, eager: bool):
    """As the target alone, which is held to transformers elsewhere (test_vision.py)."""
    with made(lab, "qwen3_5_mtp", 0.3, experts=experts) as (target, speculative, _):
        asked = {"prompts": [as_openai(chat) for chat in CHATS], "chat": True, "gen": GREEDY}
        steps: list[dict[str, Any]] = [
            {"name": "batch", "kind": "call", **asked},
            {"name": "staggered", "kind": "staggered", "after": 3, **asked},
        ]
        options = {"dtype": "float32", "eager_mode": eager}
        alone = lab.engine(target, steps, **options)
        drafted = lab.engine(target, steps, speculative=speculative, **options)
        chunks = {"max_prefill_token_num": 48, "speculative": speculative}
        split = lab.engine(target, steps, **options, **chunks)
        for step in ("batch", "staggered"):
            assert drafted.tokens(step) == alone.tokens(step)
            assert split.tokens(step) == alone.tokens(step)
        assert drafted.results["graphs"]["late"] == 0
        assert "eager" not in [outcome for _, outcome, _ in drafted.results["graphs"]["phases"]]
        assert 0 < rate(drafted) < 1


SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 12}


def rule_steps(said: list[list[int]], tokenizer: Any) -> list[dict[str, Any]]:
    """Steps whose next tokens depend on the text so far. said: what the target says without rules."""
    pairs = [tokenizer.decode(tokens[at : at + 2]) for tokens in said for at in (3, 7)]
    bad = {"bad_words": [pair for pair in pairs if pair and "\ufffd" not in pair]}
    stops = {"stop_token_ids": sorted({tokens[4] for tokens in said}), "ignore_eos": False}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    drawn = {"do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 0.9, "random_seed": 5}
    styles = {
        "schema": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "regex": {"type": "regex_schema", "regex_schema": "([a-z]{3,8} ){12}"},
    }
    gens: dict[str, dict[str, Any]] = {
        "penalties": {**GREEDY, "do_sample": True, "top_k": 1, **penalties},
        "seeds": {**GREEDY, **drawn},
        "seeds and penalties": {**GREEDY, **drawn, **penalties, "min_p": 0.02},
        "bad words": {**GREEDY, **bad},
        "min_new_tokens": {**GREEDY, **stops, "min_new_tokens": 14},
        "ngram": {**GREEDY, **stops, "repetition_ngram_size": 1, "repetition_ngram_threshold": 3},
        **{name: {"max_new_tokens": 150, "response_format": style} for name, style in styles.items()},
    }
    return [
        {"name": name, "kind": "token_ids_of", "prompts": PROMPTS, "gen": gen} for name, gen in gens.items()
    ]


@pytest.mark.parametrize("method", ["eagle", pytest.param("qwen3_5_mtp", marks=pytest.mark.full)])
@pytest.mark.parametrize("blocks", [0, 24])
def test_rules_that_read_the_text(lab: Lab, blocks: int, method: str):
    """As the target alone: each verified place reads the drafts before it, and a preempted text starts anew."""
    with made(lab, method, STRENGTHS[method][1]) as (target, speculative, said):
        steps = rule_steps(said, lab.tokenizer(target))
        options = {"dtype": "float32", "eager_mode": True, "block_size": 16, "session_len": 320}
        alone = lab.engine(target, steps, **options)
        drafted = lab.engine(target, steps, **options, num_gpu_blocks=blocks, speculative=speculative)
        for step in steps:
            assert drafted.tokens(step["name"]) == alone.tokens(step["name"]), step["name"]
        assert alone.tokens("bad words") != said
        assert sum(map(sum, accepted(drafted))) > 0
        assert blocks == 0 or sum(drafted.results["preemptions"].values()) > 0
