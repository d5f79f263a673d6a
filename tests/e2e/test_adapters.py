"""LoRA adapters: two and the base model in one batch say what PEFT says with each alone, in float32."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models.families import STOP_IDS
from examples.tiny_models.vision_families import VISION
from tests.e2e.harness import EngineRun, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# Different ranks, alphas and modules: layers that LMDeploy merges have parts with both adapters, with one, with none.
DENSE = {"wide": [ATTENTION + MLP, 4, 8], "narrow": [["q_proj", "v_proj", "down_proj"], 8, 4]}
SPARSE = {"wide": [ATTENTION, 4, 8], "narrow": [["v_proj", "o_proj"], 8, 4]}
FUSED = {"wide": [["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], 4, 8], "narrow": [["qkv_proj"], 8, 4]}
FAMILIES: dict[str, dict[str, list[Any]]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "mistral_window": DENSE,
    "gemma": DENSE,
    "gemma2_window": DENSE,
    "gemma3_window": DENSE,
    "phi3_longrope": FUSED,
    "qwen2_moe": SPARSE,
    "qwen3_moe": SPARSE,
    "qwen2_vl": DENSE,
    "qwen2_5_vl": SPARSE,
}
# Ranks and alphas that differ between layers, too.
PATTERNS: dict[str, list[Any]] = {
    "wide": [ATTENTION + MLP, 4, 4, {"use_rslora": True}],
    "narrow": [
        ["q_proj", "v_proj", "down_proj"],
        8,
        4,
        {
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, "v_proj": 5},
            "alpha_pattern": {r"layers\.1\..*": 10, "down_proj": 1},
        },
    ],
}
# On qwen2, whose q, k and v have biases.
DORA: dict[str, list[Any]] = {
    "wide": [ATTENTION + MLP, 4, 4, {"use_dora": True}],
    "narrow": [["q_proj", "down_proj"], 8, 4, {"use_dora": True, "use_rslora": True}],
    "plain": [["q_proj", "o_proj"], 4, 8],
}
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 110)), [100, 200, 300]]
NEW = 20
WHO = ["", "wide", "narrow"]


@dataclass(frozen=True)
class Case:
    """A model, its adapters by name, and the tokens that PEFT says: name ("" for none) -> a list for each prompt."""

    model: Path
    folder: Path
    adapters: dict[str, str]
    said: dict[str, list[list[int]]]


@contextmanager
def made(lab: Lab, family: str, adapters: dict[str, list[Any]] | None = None) -> Iterator[Case]:
    """A case. adapters: name -> what ``peft_job`` takes; None for those of ``FAMILIES``."""
    model, adapters = lab.model(family), adapters or FAMILIES[family]
    with tempfile.TemporaryDirectory(prefix="dlinfer-adapters-") as temp:
        job = {"model": str(model), "out": temp, "adapters": adapters, "prompts": PROMPTS, "new": NEW}
        alone = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        job |= {"never": STOP_IDS, "vision": family in VISION}
        lab.ask("tests.e2e.peft_job", job, 600, alone)
        said = json.loads(Path(temp, "said.json").read_text())
        yield Case(model, Path(temp), {name: str(Path(temp, name)) for name in adapters}, said)


def step(name: str = "mixed", who: Sequence[str] = WHO) -> dict[str, Any]:
    """Every prompt by every adapter and by none, all at once."""
    return {
        "name": name,
        "kind": "token_ids_of",
        "prompts": [prompt for prompt in PROMPTS for _ in who],
        "adapters": [each or None for _ in PROMPTS for each in who],
        "gen": {"max_new_tokens": NEW, "ignore_eos": True},
    }


def expected(case: Case) -> list[list[int]]:
    return [case.said[who][number] for number in range(len(PROMPTS)) for who in ("", *case.adapters)]


def check(run: EngineRun, case: Case, name: str = "mixed") -> None:
    wanted = expected(case)
    assert len(set(map(tuple, wanted))) == len(wanted), "each adapter says something of its own"
    assert run.tokens(name) == wanted


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_says_what_peft_says(family: str, lab: Lab):
    with made(lab, family) as case:
        options: dict[str, Any] = {"dtype": "float32", "adapters": case.adapters}
        starts = [(case.model, [step()], options | {"eager_mode": eager}) for eager in (True, False, False)]
        eager, first, second = lab.engines(starts, environment={"DLINFER_CACHE_DIR": f"{case.folder}/cache"})
        check(eager, case)
        check_graphs(first, case, "compiled")
        check_graphs(second, case, "loaded")


def test_graphs_of_a_mixed_batch_say_what_peft_says(lab: Lab):
    with made(lab, "llama") as case:
        check_graphs(lab.engine(case.model, [step()], dtype="float32", adapters=case.adapters), case)


@pytest.mark.parametrize("eager", [True, False])
def test_ranks_and_scalings_of_patterns(eager: bool, lab: Lab):
    with made(lab, "llama", PATTERNS) as case:
        options: dict[str, Any] = {"dtype": "float32", "adapters": case.adapters}
        run = lab.engine(case.model, [step()], eager_mode=eager, **options)
        check(run, case)


@pytest.mark.parametrize("eager", [True, False])
def test_magnitudes_of_dora(eager: bool, lab: Lab):
    with made(lab, "qwen2", DORA) as case:
        options: dict[str, Any] = {"dtype": "float32", "adapters": case.adapters}
        check(lab.engine(case.model, [step(who=("", *DORA))], eager_mode=eager, **options), case)


def check_graphs(run: EngineRun, case: Case, outcome: str = "") -> None:
    """The tokens, and that no graph was compiled while requests ran, or left to run eagerly."""
    check(run, case)
    graphs = run["graphs"]
    assert graphs["late"] == 0
    assert {found for _, found, _ in graphs["phases"]} <= ({outcome} if outcome else {"compiled", "loaded"})


@pytest.mark.full
def test_on_openvino_and_with_shared_blocks_and_chunks(lab: Lab):
    """Blocks of the prefix cache belong to one adapter: the same prompt of another has other keys."""
    with made(lab, "llama") as case:
        options: dict[str, Any] = {"dtype": "float32", "adapters": case.adapters}
        split = options | {"enable_prefix_caching": True, "max_prefill_token_num": 32, "eager_mode": True}
        check(lab.engine(case.model, [step()], environment={"DLINFER_ENGINE": "openvino"}, **options), case)
        run = lab.engine(case.model, [step("first"), step("again")], **split)
        check(run, case, "first")
        check(run, case, "again")
        assert max(response["cached_tokens"] for response in run["again"]) > 0


@pytest.mark.full
def test_an_adapter_that_there_is_not_is_refused_and_harms_nobody(lab: Lab):
    """LMDeploy 0.18 itself: a KeyError in the engine's loop, after which every request fails."""
    with made(lab, "llama") as case:
        wrong = step("wrong") | {"prompts": [[5, 6]], "adapters": ["nobody"]}
        engine_alone = wrong | {"name": "engine alone", "past_checks": True}
        steps = [wrong, engine_alone, step("after")]
        run = lab.engine(case.model, steps, dtype="float32", eager_mode=True, adapters=case.adapters)
        (refused,) = run["wrong"]
        assert refused == {"refused": "There is no adapter 'nobody'. Loaded adapters: narrow, wide."}
        assert "refused" in run["engine alone"][0]
        check(run, case, "after")
