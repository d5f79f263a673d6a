"""Sampling, penalties, logprobs and guided decoding against LMDeploy's own rules, computed from HF's logits.

All steps share one engine start (module fixture); each test reads its part of the answers.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from examples.tiny_models.families import STOP_IDS
from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.sampling_oracle import chi_square, distribution, log_softmax, penalised

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

SAMPLED = {"do_sample": True, "max_new_tokens": 20, "ignore_eos": True}

# What each option is tried with; temperature and min_p also where they matter most, far from their neutral
# values.
FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5, "temperature": 1.0},
    "top_p": {"top_k": 0, "top_p": 0.5, "temperature": 1.0},
    "min_p": {"top_k": 0, "min_p": 0.3, "temperature": 1.0},
    "all": {"top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
}
TEMPERATURES = (0.4, 1.6)
DRAWS = 600
TOP_K = 8
# 1 in 10,000 for 7 degrees of freedom; the seeds are fixed, so this cannot flicker.
CHI_SQUARE_7 = 29.9
DRAWN_PROMPT = 2
PENALTY, PRESENCE, FREQUENCY = 1.4, 0.3, 0.2
LOGPROBS = 5

JUDGED = ["penalty", "openai penalties", "logprobs", *FILTERS]

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "alive": {"type": "boolean"},
    },
    "required": ["kind", "count", "alive"],
    "additionalProperties": False,
}
REGEX = r"call me [a-z]{1,10}!"


@dataclass
class Answers:
    """LMDeploy's run, and HF's logits for every sequence of the steps in ``JUDGED`` from one other process."""

    prompts: list[list[int]]
    run: EngineRun
    hf: dict[str, np.ndarray]

    def steps(self, name: str) -> list[tuple[list[int], np.ndarray]]:
        """For each request of a step: its tokens, and HF's logits [tokens, vocab] that chose them."""
        first = JUDGED.index(name) * len(self.prompts)
        logits = [self.hf[f"logits_{first + i}"][len(p) - 1 : -1] for i, p in enumerate(self.prompts)]
        return list(zip(self.run.tokens(name), logits, strict=True))


@pytest.fixture(scope="module")
def answers(lab: Lab) -> Answers:
    model = lab.model("qwen2")
    prompts = lab.prompts(model)
    seeds = [{**SAMPLED, "top_k": 50, "temperature": 1.0, "random_seed": seed} for seed in (7, 8, 7)]
    same = [prompts[2]] * 3
    schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    # Whitespace is legal between the parts of JSON, and a random model may like it for ever.
    tokens = lab.tokenizer(model)
    blank = [i for i in range(tokens.get_vocab_size()) if re.search(r"\s", tokens.decode([i], False))]
    guided = {
        "max_new_tokens": 120,
        "do_sample": True,
        "top_k": 0,
        "temperature": 1.0,
        "bad_token_ids": blank,
    }
    steps: list[dict[str, Any]] = [
        {"name": "seeds", "kind": "call", "prompts": same, "gen": seeds},
        {"name": "seeds again", "kind": "call", "prompts": same, "gen": seeds},
        {"name": "seed alone", "kind": "one_by_one", "prompts": same[:1], "gen": seeds[:1]},
        {
            "name": "top_k 1",
            "kind": "call",
            "prompts": prompts,
            "gen": {**SAMPLED, "top_k": 1, "max_new_tokens": 40},
        },
        {
            "name": "penalty",
            "kind": "one_by_one",
            "prompts": prompts,
            "gen": {**SAMPLED, "top_k": 1, "repetition_penalty": PENALTY, "max_new_tokens": NEW_TOKENS},
        },
        {
            "name": "openai penalties",
            "kind": "call",
            "prompts": prompts,
            "gen": {
                **SAMPLED,
                "top_k": 1,
                "temperature": 0.5,
                "presence_penalty": PRESENCE,
                "frequency_penalty": FREQUENCY,
                "max_new_tokens": NEW_TOKENS,
            },
        },
        {
            "name": "logprobs",
            "kind": "call",
            "prompts": prompts,
            "gen": {"max_new_tokens": 10, "ignore_eos": True, "logprobs": LOGPROBS},
        },
        {
            "name": "json",
            "kind": "call",
            "prompts": prompts * 2,
            "gen": [{**guided, "random_seed": i, "response_format": schema} for i in range(8)],
        },
        {
            "name": "regex",
            "kind": "call",
            "prompts": prompts,
            "gen": {"max_new_tokens": 60, "response_format": {"type": "regex_schema", "regex_schema": REGEX}},
        },
    ]
    for name, options in FILTERS.items():
        gens = [{**SAMPLED, **options, "random_seed": 11 + i} for i in range(4)]
        steps.append({"name": name, "kind": "call", "prompts": prompts, "gen": gens})
    for temperature in TEMPERATURES:
        gens = [
            {**SAMPLED, "max_new_tokens": 1, "top_k": TOP_K, "temperature": temperature, "random_seed": seed}
            for seed in range(DRAWS)
        ]
        steps.append(
            {
                "name": f"draws {temperature}",
                "kind": "call",
                "prompts": [prompts[DRAWN_PROMPT]] * DRAWS,
                "gen": gens,
            }
        )
    run = lab.engine(model, steps, max_batch_size=64, logprobs_mode="raw_logprobs", eager_mode=True)
    ids = [lab.tokenizer(model).encode(prompt).ids for prompt in prompts]
    sequences = [[*ids[i], *tokens] for step in JUDGED for i, tokens in enumerate(run.tokens(step))]
    hf = lab.reference(model, score=sequences, prompts=prompts, max_new_tokens=NEW_TOKENS)
    return Answers(ids, run, hf)


def test_random_seed_repeats(answers: Answers) -> None:
    first, other, same = answers.run.tokens("seeds")
    assert answers.run.tokens("seeds again") == [first, other, same]
    assert first == same, "one seed gave two answers within a batch"
    assert first != other, "two seeds gave one answer"
    assert len(set(first)) > 1


def test_random_seed_does_not_depend_on_the_batch(answers: Answers) -> None:
    assert answers.run.tokens("seed alone") == answers.run.tokens("seeds")[:1]


def test_top_k_1_is_greedy(answers: Answers) -> None:
    assert answers.run.tokens("top_k 1") == [answers.hf[f"tokens_{i}"].tolist() for i in range(4)]


@pytest.mark.parametrize("name", FILTERS)
def test_filters_admit_only_what_the_rules_admit(answers: Answers, name: str) -> None:
    surprises = 0
    for tokens, logits in answers.steps(name):
        assert len(tokens) == SAMPLED["max_new_tokens"]
        for at, (token, row) in enumerate(zip(tokens, logits, strict=True)):
            allowed = distribution(row, STOP_IDS, **FILTERS[name], slack=1e-4)
            assert allowed[token] > 0, (
                f"token {token} at {at} is outside the {np.count_nonzero(allowed)} allowed"
            )
            surprises += token != int(allowed.argmax())
    assert surprises > 8, "hardly anything was sampled: the test would pass on greedy decoding"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_temperature_shapes_the_distribution(answers: Answers, temperature: float) -> None:
    # the logits after the prompt alone: any judged sequence of this prompt has them in front
    row = answers.steps("logprobs")[DRAWN_PROMPT][1][0]
    drawn = np.array([tokens[0] for tokens in answers.run.tokens(f"draws {temperature}")])
    expected = distribution(row, STOP_IDS, temperature=temperature, top_k=TOP_K)
    counts = np.bincount(drawn, minlength=len(row))
    inside = expected > 0
    assert counts[inside].sum() == DRAWS, "a token outside top-k was drawn"
    assert chi_square(counts[inside], expected[inside]) < CHI_SQUARE_7
    neutral = distribution(row, STOP_IDS, temperature=1.0, top_k=TOP_K)
    assert chi_square(counts[inside], neutral[inside]) > CHI_SQUARE_7, "temperature 1 would pass as well"


def test_repetition_penalty(answers: Answers) -> None:
    """Greedy under a penalty on the tokens of the prompt and of the answer, the newest one included."""
    changed = 0
    for prompt, (tokens, logits) in zip(answers.prompts, answers.steps("penalty"), strict=True):
        assert len(tokens) == NEW_TOKENS
        for at, (token, row) in enumerate(zip(tokens, logits, strict=True)):
            changed += assert_best(penalised(row, [*prompt, *tokens[:at]], PENALTY), token, row)
    assert changed, "the penalty changes nothing here"


def test_presence_and_frequency_penalties(answers: Answers) -> None:
    """As OpenAI and vLLM define them: of the answer's tokens, whatever the temperature."""
    changed = 0
    for tokens, logits in answers.steps("openai penalties"):
        assert len(tokens) == NEW_TOKENS
        for at, (token, row) in enumerate(zip(tokens, logits, strict=True)):
            counts = np.bincount(tokens[:at], minlength=len(row))
            scores = row.astype(np.float64) - FREQUENCY * counts - PRESENCE * (counts > 0)
            changed += assert_best(scores, token, row)
    assert changed, "the penalties change nothing here"


def assert_best(scores: np.ndarray, token: int, raw: np.ndarray) -> bool:
    """Whether the best token of ``scores``, which is the one that was chosen, is another than that of ``raw``."""
    scores[STOP_IDS] = -np.inf
    best = int(scores.argmax())
    assert token == best, f"token {token} instead of {best}"
    raw[STOP_IDS] = -np.inf
    return best != int(raw.argmax())


def test_logprobs(answers: Answers) -> None:
    """``raw_logprobs``: the chosen token and the best five, of the unprocessed logits."""
    responses = answers.run["logprobs"]
    for response, (tokens, logits) in zip(responses, answers.steps("logprobs"), strict=True):
        assert len(response["logprobs"]) == len(tokens) == 10
        for token, pairs, expected in zip(tokens, response["logprobs"], log_softmax(logits), strict=True):
            got = {int(i): value for i, value in pairs}
            assert set(got) == set(np.argsort(-expected)[:LOGPROBS].tolist()) | {token}
            np.testing.assert_allclose(list(got.values()), expected[list(got)], atol=2e-4, rtol=0)


def test_json_schema(answers: Answers) -> None:
    answered = answers.run["json"]
    for response in answered:
        assert response["finish_reason"] == "stop", response
        value = json.loads(response["text"])
        assert set(value) == {"kind", "count", "alive"}, value
        assert value["kind"] in ("fox", "dog")
        assert isinstance(value["alive"], bool)
        assert type(value["count"]) is int
        assert 0 <= value["count"] <= 99
    assert len({response["text"] for response in answered}) > 2, "the schema leaves hardly a choice"


def test_regex(answers: Answers) -> None:
    for response in answers.run["regex"]:
        assert response["finish_reason"] == "stop"
        assert re.fullmatch(REGEX, response["text"]), response["text"]


@pytest.mark.full
def test_logprobs_mode_raw_logits(lab: Lab, answers: Answers) -> None:
    """``raw_logits`` reports the logits themselves."""
    model = lab.model("qwen2")
    gen = {"max_new_tokens": 10, "ignore_eos": True, "logprobs": LOGPROBS}
    step = {"name": "logits", "kind": "call", "prompts": lab.prompts(model), "gen": gen}
    run = lab.engine(model, [step], logprobs_mode="raw_logits")
    for response, (tokens, logits) in zip(run["logits"], answers.steps("logprobs"), strict=True):
        assert response["token_ids"] == tokens
        for pairs, expected in zip(response["logprobs"], logits, strict=True):
            got = {int(i): value for i, value in pairs}
            np.testing.assert_allclose(list(got.values()), expected[list(got)], atol=2e-4, rtol=0)
