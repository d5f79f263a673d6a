"""States of linear attention belong to their sequence: through preemption, shared prefixes and slots used again.

The oracle is transformers, one prompt after the other. Prompts and answers are so many that each slot of the cache of
states serves several sequences.
"""

from typing import Any

import pytest

from tests.e2e.harness import EngineRun, Lab
from tests.e2e.matrix import POSITION_SEED

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

LENGTHS = (80, 33, 81, 96, 64, 50, 80, 17)
NEW = 40
GEN = {"max_new_tokens": NEW, "ignore_eos": True}
COMMON = {"eager_mode": True, "block_size": 16, "session_len": 256, "max_batch_size": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "few blocks": {"num_gpu_blocks": 24},
    "kept states": {"enable_prefix_caching": True, "prefix_cache_state_budget": 64},
    "chunked": {"enable_prefix_caching": True, "prefix_cache_state_budget": 64, "max_prefill_token_num": 32},
}
FAMILIES = ("qwen3_5", "qwen3_next")


@pytest.fixture(scope="module")
def asked(lab: Lab) -> dict[str, tuple[list[list[int]], dict[str, EngineRun]]]:
    """Family -> (transformers' tokens of each prompt, engine by configuration)."""
    starts, oracles = [], {}
    for family in FAMILIES:
        model = lab.model(family, POSITION_SEED)
        texts = lab.prompts(model, LENGTHS)
        longer = [f"{text} and what now" for text in texts]
        hf = lab.reference(model, prompts=[*texts, *longer], max_new_tokens=NEW)
        oracles[family] = [hf[f"tokens_{i}"].tolist() for i in range(2 * len(texts))]
        steps = [
            {"name": "texts", "kind": "call", "prompts": texts, "gen": GEN},
            {"name": "longer", "kind": "one_by_one", "prompts": longer, "gen": GEN},
        ]
        starts += [(model, steps, COMMON | options) for options in CONFIGS.values()]
    runs = iter(lab.engines(starts))
    return {family: (oracles[family], {name: next(runs) for name in CONFIGS}) for family in FAMILIES}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(asked: dict[str, Any], family: str, config: str) -> None:
    expected, runs = asked[family]
    run = runs[config]
    assert run.tokens("texts") + run.tokens("longer") == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configurations_do_what_they_are_named_for(asked: dict[str, Any], family: str) -> None:
    _, runs = asked[family]
    assert runs["few blocks"].results["preemptions"]["texts"] > 0
    cached = {name: [answer["cached_tokens"] for answer in run["longer"]] for name, run in runs.items()}
    assert cached["few blocks"] == [0] * 8
    # LMDeploy keeps the state at the end of a prompt, also within a block, and at the ends of chunks.
    assert cached["kept states"] == list(LENGTHS)
    assert min(cached["chunked"]) > 0
