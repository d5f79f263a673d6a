"""tp=2 on the CPU: LMDeploy's own processes give the tokens of one rank, and of transformers."""

from typing import Any

import pytest

from examples.tiny_models.families import BRIEF
from tests.e2e.cell_checks import compare_tokens
from tests.e2e.harness import NEW_TOKENS, PROMPT_LENGTHS, Lab
from tests.e2e.matrix import POSITION_SEED, POSITION_SEEDS

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1200)]

# Of each class in ``checks.model.tensor_parallel.COMPARED``.
FAMILIES = (
    *("llama", "qwen2", "qwen3", "internlm2", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("mistral_window", "gemma", "gemma2_window", "internlm3"),
)
QUICK = ("llama", "graph")


def _cells():
    for family in FAMILIES:
        for mode in ("eager", "graph"):
            yield pytest.param(family, mode, marks=() if (family, mode) == QUICK else pytest.mark.full)


def _many(lab: Lab, model: Any) -> dict[str, Any]:
    prompts = lab.prompts(model, PROMPT_LENGTHS)
    return {"prompts": prompts, "gen": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}}


@pytest.mark.parametrize(("family", "mode"), _cells())
def test_two_ranks_give_the_tokens_of_one(family: str, mode: str, lab: Lab) -> None:
    """Which are transformers', as those of one rank are (test_matrix.py). Prompts join running ones, in pieces."""
    seed = POSITION_SEEDS.get(family, POSITION_SEED) if family in BRIEF else 0
    model = lab.model(family, seed)
    many = _many(lab, model)
    steps = [
        {"name": "batch", "kind": "call", **many},
        {"name": "staggered", "kind": "staggered", "after": 5, **many},
        {"name": "ranks", "kind": "ranks"},
    ]
    hf = lab.reference(model, prompts=many["prompts"], max_new_tokens=NEW_TOKENS, dtype="float32")
    options = {"tp": 2, "eager_mode": mode == "eager", "dtype": "float32", "max_prefill_token_num": 32}
    run = lab.engine(model, steps, environment={"DLINFER_FALLBACK": "error"}, **options)
    for step in ("batch", "staggered"):
        assert compare_tokens(step, run, hf, "float32") == []
    assert run["ranks"] == 2


@pytest.mark.full
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(("family", "weights"), [("llama_awq_groups", ""), ("llama", "int8")])
def test_packed_weights(family: str, weights: str, mode: str, lab: Lab) -> None:
    """Tokens of two ranks are those of one with the same weights."""
    model = lab.model(family)
    steps = [{"name": "batch", "kind": "call", **_many(lab, model)}]
    options = {"eager_mode": mode == "eager", "dtype": "float32"}
    starts = [(model, steps, {"tp": tp, **options}) for tp in (1, 2)]
    one, two = lab.engines(starts, environment={"DLINFER_CPU_WEIGHTS": weights} if weights else None)
    assert two.tokens("batch") == one.tokens("batch")


@pytest.mark.full
def test_bf12(lab: Lab) -> None:
    """Tokens are those of two ranks with plain weights: in 16 bits the ranks' sums round otherwise than one rank's."""
    model = lab.model("llama", dtype="bfloat16")
    steps = [{"name": "batch", "kind": "call", **_many(lab, model)}]
    options = {"tp": 2, "eager_mode": True, "dtype": "bfloat16"}
    plain = lab.engine(model, steps, **options)
    packed = lab.engine(model, steps, environment={"DLINFER_CPU_WEIGHTS": "bf12"}, **options)
    assert packed.tokens("batch") == plain.tokens("batch")


@pytest.mark.full
def test_a_killed_rank(lab: Lab) -> None:
    """Ends the other one, and every request, with an error."""
    model = lab.model("llama")
    many = {"prompts": lab.prompts(model), "gen": {"max_new_tokens": 400, "ignore_eos": True}}
    steps = [{"name": "killed", "kind": "killed_rank", **many}]
    run = lab.engine(model, steps, tp=2, eager_mode=True, dtype="float32")
    assert run["killed"]["seconds"] < 10
    assert run["killed"]["alive"] == 0
    assert all(reason == "error" for reason in run["killed"]["reasons"])
    assert "rank 1 of 2 ended: it was killed by SIGKILL" in run.log
