"""Each answer under pressure equals the answer alone: on a KV cache that preempts, and with prompts read in chunks.

"Alone" is the same engine with room for all, asked one request after the other. Guided answers are also validated by
what they were to follow.
"""

import json
import re
from typing import Any

import pytest

from tests.e2e.harness import EngineRun, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 30}},
    "required": ["a"],
    "additionalProperties": False,
}
REGEX = r"([a-z]{4,8} ){60}end"
TAG = {
    "type": "tag",
    "begin": "<answer>",
    "content": {"type": "regex", "pattern": "([0-9]{3}-){30}"},
    "end": "</answer>",
}
ENDS = {"max_new_tokens": 600, "do_sample": True, "top_k": 0, "temperature": 1.0}
DRAWN = {"max_new_tokens": 120, "do_sample": True, "top_k": 40, "temperature": 1.0, "ignore_eos": True}
# Of several tokens for the most part.
BAD = ["he", "th", "an", " s", "es", "e "]

KINDS: dict[str, dict[str, Any]] = {
    "schema": {
        **ENDS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "regex": {**ENDS, "response_format": {"type": "regex_schema", "regex_schema": REGEX}},
    "tag": {**ENDS, "response_format": {"type": "structural_tag", "format": TAG}},
    "penalties": {**DRAWN, "repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "logprobs": {**DRAWN, "logprobs": 5, "frequency_penalty": 1.0},
    "ngram": {
        **DRAWN,
        "ignore_eos": False,
        "repetition_ngram_size": 1,
        "repetition_ngram_threshold": 4,
    },
    "bad_words": {**DRAWN, "bad_words": BAD, "skip_special_tokens": False},
    "min_new_tokens": {**DRAWN, "ignore_eos": False, "top_k": 20, "min_new_tokens": 100},
}
PROMPTS = [f"request {i}: " + "the quick brown fox " * (2 + i) for i in range(8)]
LONG_TOKENS = 480
# Leaves no time for prompts in steps that decode, so a long prompt is read in many chunks.
HURRIED = {"DLINFER_CPU_STEP_SECONDS": "0.001"}


def is_valid(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "tag":
        return re.fullmatch(r"<answer>([0-9]{3}-){30}</answer>", text) is not None
    return len(json.loads(text)["a"]) == 30


@pytest.fixture(scope="module")
def runs(lab: Lab) -> tuple[EngineRun, EngineRun, EngineRun]:
    """(each alone, all at once with few blocks, a long prompt beside four that decode)."""
    model = lab.model("qwen2")
    (long,) = lab.prompts(model, (LONG_TOKENS,))
    alone, crowded, chunked = [], [], []
    for name, options in KINDS.items():
        gens = [{**options, "random_seed": seed} for seed in range(len(PROMPTS))]
        crowded.append({"name": name, "kind": "call", "prompts": PROMPTS, "gen": gens})
        last = {**options, "random_seed": 99}
        alone.append({"name": name, "kind": "one_by_one", "prompts": [*PROMPTS, long], "gen": [*gens, last]})
        others = {**DRAWN, "max_new_tokens": 200, "random_seed": 1}
        chunked.append(
            {
                "name": name,
                "kind": "staggered",
                "after": 4,
                "prompts": [*PROMPTS[:4], long],
                "gen": [others] * 4 + [last],
            }
        )
    common = {"session_len": 1200, "eager_mode": True, "logprobs_mode": "raw_logprobs", "block_size": 16}
    few = common | {"session_len": 700, "num_gpu_blocks": 44}
    engines = [(model, alone, common), (model, crowded, few), (model, chunked, common)]
    first, second, third = lab.engines(engines, environment=HURRIED)
    return first, second, third


def said(answer: dict[str, Any]) -> tuple[list[int], str, str]:
    return answer["token_ids"], answer["text"], answer["finish_reason"]


def assert_logprobs_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same tokens in each row, at the same logprobs."""
    assert len(one["logprobs"]) == len(other["logprobs"])
    for rows in zip(one["logprobs"], other["logprobs"], strict=True):
        first, second = (dict(map(tuple, row)) for row in rows)
        assert first == pytest.approx(second, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cache_that_preempts(runs: tuple[EngineRun, EngineRun, EngineRun], kind: str) -> None:
    alone, crowded, _ = runs
    assert crowded.results["preemptions"][kind] > 0, "nothing was preempted"
    for one, other in zip(alone[kind], crowded[kind], strict=False):
        assert said(other) == said(one)
        assert_logprobs_equal(other, one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks_beside_others(runs: tuple[EngineRun, EngineRun, EngineRun], kind: str) -> None:
    alone, _, chunked = runs
    one, other = alone[kind][-1], chunked[kind][-1]
    assert other["input_token_len"] == LONG_TOKENS
    assert said(other) == said(one)
    assert_logprobs_equal(other, one)


@pytest.mark.parametrize("kind", ["schema", "regex", "tag"])
def test_guided_answers_are_valid(runs: tuple[EngineRun, EngineRun, EngineRun], kind: str) -> None:
    for run in runs:
        for answer in run[kind] if run is not runs[2] else run[kind][-1:]:
            assert answer["finish_reason"] == "length" or is_valid(kind, answer["text"])
        assert any(answer["finish_reason"] == "stop" for answer in run[kind])


def test_the_kinds_do_what_they_are_named_for(runs: tuple[EngineRun, EngineRun, EngineRun]) -> None:
    alone = runs[0]
    assert any(
        len(tokens) < 120 and alone["ngram"][i]["finish_reason"] == "stop"
        for i, tokens in enumerate(alone.tokens("ngram"))
    )
    assert not any(word in answer["text"] for answer in alone["bad_words"] for word in BAD)
    assert all(len(tokens) >= 100 for tokens in alone.tokens("min_new_tokens"))
