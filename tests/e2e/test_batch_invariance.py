"""DLINFER_CPU_BATCH_INVARIANT=1: answers under pressure have the bits of the answers alone, tokens and logprobs.

"Under pressure": random batches, prompts in chunks, a cache that preempts, cached prefixes, and all of these at once.
benchmarks.batch_invariance runs many more batches.
"""

import random
from typing import Any

import pytest

from tests.e2e.harness import EngineRun, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

ON = {"DLINFER_CPU_BATCH_INVARIANT": "1"}
COMMON: dict[str, Any] = {"block_size": 16, "session_len": 400, "logprobs_mode": "raw_logprobs"}
PRESSURE: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_prefill_token_num": 32},
    "preempted": {"num_gpu_blocks": 40},
    "prefixes": {"enable_prefix_caching": True},
    "all": {"max_prefill_token_num": 32, "num_gpu_blocks": 48, "enable_prefix_caching": True},
}
LENGTHS = (1, 2, 9, 30, 64, 100, 130, 180)
BATCHES = 4

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "qwen2 bfloat16": ("qwen2", "bfloat16", {"eager_mode": False}, {}),
    "qwen2 bfloat16 eager": ("qwen2", "bfloat16", {"eager_mode": True}, {}),
    "llama float32": ("llama", "float32", {"eager_mode": False}, {}),
    "llama float16 eager": ("llama", "float16", {"eager_mode": True}, {}),
    "mixtral": ("mixtral", "bfloat16", {"eager_mode": False}, {}),
    "qwen3 in 12 bits": ("qwen3", "bfloat16", {"eager_mode": False}, {"DLINFER_CPU_WEIGHTS": "bf12"}),
    "llama in 8 bits": ("llama", "bfloat16", {"eager_mode": False}, {"DLINFER_CPU_WEIGHTS": "int8"}),
    "llama in 4 bits": ("llama_awq", "float16", {"eager_mode": False}, {}),
}
"""Name -> family, dtype, options of the engine, and environment."""

QUICK = "qwen2 bfloat16"
PARAMS = [pytest.param(name, marks=[] if name == QUICK else pytest.mark.full) for name in MODELS]


Runs = tuple[list[list[int]], list[EngineRun]]


def requests(lab: Lab, family: str, dtype: str) -> list[tuple[str, dict[str, Any]]]:
    """Prompts and options, greedy and drawn. The second half begins as the first half does."""
    texts = lab.prompts(lab.model(family, dtype=dtype), LENGTHS)
    texts += [f"{text} and what now" for text in texts]
    found = []
    for number, text in enumerate(texts):
        options: dict[str, Any] = {"max_new_tokens": 20 + number % 3 * 10, "ignore_eos": True, "logprobs": 3}
        if number % 2:
            options |= {"do_sample": True, "random_seed": number, "temperature": 0.9, "top_p": 0.9}
        found.append((text, options))
    return found


def step(name: str, kind: str, asked: list[tuple[str, dict[str, Any]]], **more: Any) -> dict[str, Any]:
    prompts, options = zip(*asked, strict=True)
    return {"name": name, "kind": kind, "prompts": [*prompts], "gen": [*options], **more}


@pytest.fixture(scope="module", params=PARAMS)
def runs(lab: Lab, request: pytest.FixtureRequest) -> Runs:
    """The requests of each batch, one run alone, and one for each kind of pressure."""
    family, dtype, options, environment = MODELS[request.param]
    model, asked, draw = lab.model(family, dtype=dtype), requests(lab, family, dtype), random.Random(0)
    batches = [draw.sample(range(len(asked)), draw.randint(2, len(asked))) for _ in range(BATCHES)]
    crowded = []
    for number, batch in enumerate(batches):
        chosen = [asked[i] for i in batch]
        crowded.append(step(str(number), "staggered" if number % 2 else "call", chosen, after=1))
    engines = [(model, [step("alone", "one_by_one", asked)], COMMON | options)]
    engines += [(model, crowded, COMMON | options | pressure) for pressure in PRESSURE.values()]
    return batches, lab.engines(engines, environment=ON | environment)


def bits(answer: dict[str, Any]) -> tuple[Any, ...]:
    logprobs = [sorted((token, value.hex()) for token, value in row) for row in answer["logprobs"]]
    return answer["token_ids"], answer["text"], answer["finish_reason"], logprobs


def test_answers_have_the_bits_of_the_answers_alone(runs: Runs) -> None:
    batches, (alone, *crowded) = runs
    for pressure, run in zip(PRESSURE, crowded, strict=True):
        for number, batch in enumerate(batches):
            for i, answer in zip(batch, run[str(number)], strict=True):
                assert bits(answer) == bits(alone["alone"][i]), (pressure, number, i)


def test_the_pressure_is_there(runs: Runs) -> None:
    _, (_, _, _, preempted, prefixes, _) = runs
    assert sum(preempted.results["preemptions"].values()) > 0
    names = map(str, range(BATCHES))
    assert any(answer["cached_tokens"] > 0 for name in names for answer in prefixes[name])
