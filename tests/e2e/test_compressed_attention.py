"""DeepSeek-V4: windows and compressed entries belong to their sequence, and released checkpoints mean their floats.

The oracle is transformers, one prompt after the other. The cells of ``deepseek_v4`` (``make models``,
``make test-full``) compare further prompts, also in graph mode.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e import released_v4
from tests.e2e.cell_checks import check_decisive
from tests.e2e.harness import EngineRun, Lab
from tests.e2e.matrix import POSITION_SEED, STRICT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

# Entries are of 4 and of 128 tokens, and blocks of 256: most answers cross an end of each.
LENGTHS = (500, 505, 508, 510, 495, 502, 509, 120, 630, 251)
NEW = 32
GEN = {"max_new_tokens": NEW, "ignore_eos": True}
COMMON = {"eager_mode": True, "session_len": 1024, "max_batch_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "few blocks": {"num_gpu_blocks": 16},  # the fewest of LMDeploy's; most sequences need three
    "kept states": {"enable_prefix_caching": True, "prefix_cache_state_budget": 64},
    "chunked": {"max_prefill_token_num": 50, "enable_prefix_caching": True, "prefix_cache_state_budget": 64},
}
RELEASED = ("fp4", "fp8")
BLOCK = 256


def tokens_of(hf: dict[str, np.ndarray], count: int) -> list[list[int]]:
    return [hf[f"tokens_{i}"].tolist() for i in range(count)]


@pytest.fixture(scope="module")
def asked(lab: Lab) -> tuple[list[list[int]], dict[str, EngineRun]]:
    """transformers' tokens of each prompt, and the engine of each configuration."""
    model = lab.model("deepseek_v4", POSITION_SEED)
    texts = lab.prompts(model, LENGTHS)
    longer = [f"{text} and what now" for text in texts]
    hf = lab.reference(model, prompts=[*texts, *longer], max_new_tokens=NEW)
    assert check_decisive(hf) == []
    steps = [
        {"name": "texts", "kind": "call", "prompts": texts, "gen": GEN},
        {"name": "longer", "kind": "one_by_one", "prompts": longer, "gen": GEN},
    ]
    runs = lab.engines([(model, steps, COMMON | options) for options in CONFIGS.values()], environment=STRICT)
    return tokens_of(hf, 2 * len(texts)), dict(zip(CONFIGS, runs, strict=True))


@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_equal_transformers(asked: Any, config: str) -> None:
    expected, runs = asked
    assert runs[config].tokens("texts") + runs[config].tokens("longer") == expected


def test_the_configurations_do_what_they_are_named_for(asked: Any) -> None:
    _, runs = asked
    cached = {name: [answer["cached_tokens"] for answer in run["longer"]] for name, run in runs.items()}
    assert cached["few blocks"] == [0] * len(LENGTHS)
    # LMDeploy keeps the state at the end of a prompt, also within a block, if the prompt has a whole block.
    assert cached["kept states"] == [length if length > BLOCK else 0 for length in LENGTHS]
    assert [count > 0 for count in cached["chunked"]] == [length > BLOCK for length in LENGTHS]
    assert runs["few blocks"].results["preemptions"]["texts"] > 0


def released(lab: Lab, experts: str) -> Path:
    folder = lab.cache / "models" / f"deepseek_v4-released-{experts}"
    released_v4.build(folder, experts, POSITION_SEED)
    return folder


@pytest.mark.parametrize("experts", RELEASED)
def test_released_checkpoints_are_computed_as_their_floats(experts: str, lab: Lab) -> None:
    model = released(lab, experts)
    texts = lab.prompts(model, (3, 140, 300))
    hf = lab.reference(model, prompts=texts, max_new_tokens=NEW)
    assert check_decisive(hf) == []
    steps = [{"name": "texts", "kind": "call", "prompts": texts, "gen": GEN}]
    run = lab.engine(model, steps, environment=STRICT, **COMMON)
    assert run.tokens("texts") == tokens_of(hf, len(texts))


@pytest.mark.full
def test_in_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(lab: Lab) -> None:
    """Token by token they may not be: where a score is rounded past another, another entry or expert is chosen."""
    model = lab.model("deepseek_v4", POSITION_SEED, "bfloat16")
    texts = [lab.tokenizer(model).encode(text).ids for text in lab.prompts(model, (60, 200, 300))]
    rounded, exact = (lab.reference(model, score=texts, dtype=dtype) for dtype in ("bfloat16", "float32"))
    step = {"name": "logits", "kind": "teacher_forced", "sequences": texts}
    run = lab.engine(model, [step], environment=STRICT, **COMMON)
    assert len(run["logits"]) == len(texts)
    for i in range(len(texts)):
        ours, theirs = (
            np.median(np.abs(logits - exact[f"logits_{i}"]).max(-1))
            for logits in (run.logits[f"logits/{i}"], rounded[f"logits_{i}"])
        )
        assert ours < 1.3 * theirs, (i, ours, theirs)
