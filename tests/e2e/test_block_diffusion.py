"""SDAR's greedy tokens, against transformers' Qwen3 with an explicit mask and SDAR's published algorithm."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from examples.tiny_models.families import STOP_IDS
from examples.tiny_models.sdar import BLOCK, MASK
from tests.e2e.harness import EngineRun, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

LENGTHS = (1, 2, 4, 9, 12, 80)
NEW_TOKENS = 22
DECISIVE = 2e-6
"""Whatever was decided by numbers that are further apart than this is the same in every order of summation."""


@dataclass(frozen=True)
class Case:
    """An engine: its model, its options, and what they are to the oracle."""

    family: str = "sdar"
    diffusion: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, Any]:
        return {"block_length": BLOCK, "mask_token": MASK, **self.diffusion}


def _case(family: str = "sdar", **named: Any) -> Case:
    """named: the oracle's options of diffusion, which are the engine's under other names, and further ones of the
    engine's."""
    names = {
        "block_length": "dllm_block_length",
        "strategy": "dllm_unmasking_strategy",
        "denoising_steps": "dllm_denoising_steps",
        "threshold": "dllm_confidence_threshold",
    }
    diffusion = {name: value for name, value in named.items() if name in names}
    options = {names.get(name, name): value for name, value in named.items()}
    return Case(family, diffusion, {"eager_mode": True, "session_len": 256, **options})


CROWDED = (
    "a small cache"  # with room for a third of a crowd's tokens: sequences lose their blocks, and begin again
)
STATIC, SEQUENTIAL = "low_confidence_static", "sequential"
CASES = {
    "default": _case(),
    "graph": _case(eager_mode=False),
    "experts": _case("sdar_moe"),
    "experts in a graph": _case("sdar_moe", eager_mode=False, block_length=8, threshold=0.06),
    "several certain tokens": _case(threshold=0.05),
    "blocks of 8": _case(block_length=8, threshold=0.07),
    "prompts in chunks": _case(block_length=8, max_prefill_token_num=32),
    "two tokens a step": _case(denoising_steps=2, threshold=0.06),
    "static": _case(strategy=STATIC),
    "static, two tokens a step": _case(strategy=STATIC, block_length=8, denoising_steps=4),
    "static, a block a step": _case(strategy=STATIC, denoising_steps=1),
    "sequential": _case(strategy=SEQUENTIAL),
    "sequential, four tokens a step": _case(strategy=SEQUENTIAL, block_length=8, denoising_steps=2),
    CROWDED: _case(num_gpu_blocks=17, block_size=16, max_prefill_token_num=128),
}

COUNTS = (1, 3, 22, 7, 8, 13)
"""How many tokens requests ask for, whose answers end anywhere in a block."""


@dataclass(frozen=True)
class Stop:
    """A request whose answer ends at the token that is at ``at`` of the answer without stops.

    prompt: its number. further: how many more stop tokens it names, which the answer does not have. count, least: its
    max_new_tokens and min_new_tokens.
    """

    prompt: int
    at: int
    further: int = 0
    count: int = NEW_TOKENS
    least: int = 0

    def words(self, tokens: list[int]) -> list[int]:
        absent = [token for token in range(5, MASK) if token not in tokens]
        return [tokens[self.at], *absent[: self.further]]


# Prompts of 1, 2, 9 and 80 tokens: an answer begins within a block, or with one. Some end in the first block, some in
# the one in which they would end anyway.
STOPS = (
    Stop(0, 0, further=3),
    Stop(1, 1),
    Stop(3, 2, further=1),
    Stop(5, 2),
    Stop(5, 9, count=11),
    Stop(5, 4, count=NEW_TOKENS, least=9),
    Stop(0, 1, least=6, further=2),
    Stop(3, 1, count=3, least=3),
)


def job(lab: Lab, case: Case, **changes: Any) -> dict[str, Any]:
    """What the oracle is asked."""
    prompts = lab.prompts(lab.model(case.family), LENGTHS)
    asked = {"prompts": prompts, "max_new_tokens": NEW_TOKENS, "never": STOP_IDS, "diffusion": case.asked}
    return asked | changes


@pytest.fixture(scope="module")
def expected(lab: Lab) -> dict[str, dict[str, np.ndarray]]:
    asked = [(lab.model(case.family), job(lab, case)) for case in CASES.values()]
    return dict(zip(CASES, lab.references(asked), strict=True))


def tokens_of(answer: dict[str, np.ndarray]) -> list[list[int]]:
    return [answer[f"tokens_{i}"].tolist() for i in range(len(LENGTHS))]


SAMPLED = {
    "do_sample": True,
    "temperature": 1.5,
    "top_k": 40,
    "max_new_tokens": NEW_TOKENS,
    "ignore_eos": True,
}
GREEDY = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
MIXED = (
    GREEDY,
    SAMPLED | {"random_seed": 1},
    GREEDY,
    SAMPLED | {"random_seed": 2, "top_p": 0.7},
    SAMPLED | {"random_seed": 3, "temperature": 0.7, "min_p": 0.1},
    GREEDY,
)


def more_steps(lab: Lab, prompts: list[str], free: list[list[int]]) -> list[dict[str, Any]]:
    """Requests that stop, requests that sample beside others that do not, and what is refused."""
    stops = [
        {
            "max_new_tokens": stop.count,
            "min_new_tokens": stop.least,
            "stop_token_ids": stop.words(free[stop.prompt]),
        }
        for stop in STOPS
    ]
    stopping = [prompts[stop.prompt] for stop in STOPS]
    return [
        {"name": "stops", "kind": "call", "prompts": stopping, "gen": stops},
        {"name": "stops alone", "kind": "one_by_one", "prompts": stopping, "gen": stops},
        {"name": "mixed", "kind": "call", "prompts": prompts, "gen": list(MIXED)},
        {"name": "mixed alone", "kind": "one_by_one", "prompts": prompts, "gen": list(MIXED)},
        {
            "name": "refused",
            "kind": "token_ids_of",
            "prompts": [[5, 6]],
            "gen": SAMPLED | {"repetition_penalty": 1.2},
        },
        {"name": "perplexity", "kind": "perplexity", "sequences": [[5, 6, 7, 8]]},
        {"name": "again", "kind": "call", "prompts": prompts, "gen": GREEDY},
    ]


@pytest.fixture(scope="module")
def runs(lab: Lab, expected: dict[str, dict[str, np.ndarray]]) -> dict[str, EngineRun]:
    starts = []
    for name, case in CASES.items():
        model = lab.model(case.family)
        many = {
            "prompts": lab.prompts(model, LENGTHS),
            "gen": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        }
        further = more_steps(lab, many["prompts"], tokens_of(expected[name])) if name == "default" else []
        counted = [{"max_new_tokens": count, "ignore_eos": True} for count in COUNTS]
        steps = [
            {"name": "batch", "kind": "call", **many},
            {"name": "one by one", "kind": "one_by_one", **many},
            {"name": "staggered", "kind": "staggered", "after": 5, **many},
            {"name": "counted", "kind": "call", **many, "gen": counted},
        ]
        if name == CROWDED:
            further = [{"name": "crowd", "kind": "call", "prompts": many["prompts"] * 2, "gen": many["gen"]}]
        starts.append((model, steps + further, case.options))
    return dict(zip(CASES, lab.engines(starts, 1500), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_tokens(name: str, runs: dict[str, EngineRun], expected: dict[str, dict[str, np.ndarray]]):
    answer, run = expected[name], runs[name]
    assert min(answer[f"gap_{i}"] for i in range(len(LENGTHS))) > DECISIVE
    for step in ("batch", "one by one", "staggered"):
        assert run.tokens(step) == tokens_of(answer), step
    cut = [tokens[:count] for tokens, count in zip(tokens_of(answer), COUNTS, strict=True)]
    assert run.tokens("counted") == cut
    assert {response["finish_reason"] for response in run["counted"]} == {"length"}


@pytest.mark.parametrize("name", ["graph", "experts in a graph"])
def test_one_graph_serves_prompts_and_blocks(name: str, runs: dict[str, EngineRun]):
    graphs = runs[name]["graphs"]
    assert sorted(phase for phase, _, _ in graphs["phases"]) == ["logits", "prefill"]
    assert all(outcome in ("compiled", "loaded") for _, outcome, _ in graphs["phases"])
    assert graphs["late"] == 0


def test_sequences_that_lost_their_blocks_begin_again(
    runs: dict[str, EngineRun], expected: dict[str, dict[str, np.ndarray]]
):
    assert runs[CROWDED]["preemptions"]["crowd"] > 0
    assert runs[CROWDED].tokens("crowd") == tokens_of(expected[CROWDED]) * 2


def test_blocks_and_strategies_differ(expected: dict[str, dict[str, np.ndarray]]):
    """No case is another one by accident. One uncertain token a step is the same by either rule of confidence."""
    dense = {name: tokens_of(answer) for name, answer in expected.items() if CASES[name].family == "sdar"}
    same = {"default", "graph", "static", CROWDED}
    different = [tokens for name, tokens in dense.items() if name not in same - {"default"}]
    assert all(one != other for i, one in enumerate(different) for other in different[:i])
    assert all(dense[name] == dense["default"] for name in same)


def test_answers_end_at_a_stop(
    lab: Lab, runs: dict[str, EngineRun], expected: dict[str, dict[str, np.ndarray]]
):
    case, free, run = CASES["default"], tokens_of(expected["default"]), runs["default"]
    model = lab.model(case.family)
    prompts = lab.prompts(model, LENGTHS)
    asked = [
        job(
            lab,
            case,
            prompts=[prompts[stop.prompt]],
            max_new_tokens=stop.count,
            never=[],
            stops=[*stop.words(free[stop.prompt]), *STOP_IDS],
            least=stop.least,
        )
        for stop in STOPS
    ]
    answers = lab.references([(model, each) for each in asked])
    assert min(answer["gap_0"] for answer in answers) > DECISIVE
    tokens = [answer["tokens_0"].tolist() for answer in answers]
    # LMDeploy's answers have the stop word; the pipeline drops it.
    ends = [each[-1] in work["stops"] for each, work in zip(tokens, asked, strict=True)]
    cut = [each[:-1] if end else each for each, end in zip(tokens, ends, strict=True)]
    for step in ("stops", "stops alone"):
        assert run.tokens(step) == cut
        reasons = [response["finish_reason"] for response in run[step]]
        assert reasons == ["stop" if end else "length" for end in ends]
    assert all(ends[:5])


def test_each_request_is_sampled_by_its_own_options(
    runs: dict[str, EngineRun], expected: dict[str, dict[str, np.ndarray]]
):
    run, greedy = runs["default"], tokens_of(expected["default"])
    assert run.tokens("mixed") == run.tokens("mixed alone")
    for gen, tokens, best in zip(MIXED, run.tokens("mixed"), greedy, strict=True):
        assert (tokens == best) == (gen is GREEDY)


def test_what_reads_the_token_before_is_refused(
    runs: dict[str, EngineRun], expected: dict[str, dict[str, np.ndarray]]
):
    run = runs["default"]
    assert "repetition_penalty=1.2" in run["refused"][0]["refused"]
    with pytest.raises(AssertionError, match="perplexity"):
        run["perplexity"]
    assert run.tokens("again") == tokens_of(expected["default"])
