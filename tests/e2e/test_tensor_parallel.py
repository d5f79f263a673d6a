"""tp=2 on the CPU: LMDeploy's own processes give the tokens of one rank, and of transformers."""

import pytest

from examples.tiny_models.families import FAMILIES
from tests.e2e.cell_checks import compare_tokens
from tests.e2e.harness import NEW_TOKENS, PROMPT_LENGTHS, Lab

MODES = ("eager",)
QUICK = ("llama", "eager")


def _cells():
    for family in FAMILIES:
        for mode in MODES:
            is_quick = (family, mode) == QUICK
            yield pytest.param(family, mode, marks=() if is_quick else pytest.mark.full)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("family", "mode"), _cells())
def test_two_ranks_give_the_tokens_of_one(family: str, mode: str, lab: Lab) -> None:
    """Which are transformers', as those of one rank are (test_matrix.py)."""
    model = lab.model(family)
    prompts = lab.prompts(model, PROMPT_LENGTHS)
    many = {"prompts": prompts, "gen": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}}
    steps = [
        {"name": "batch", "kind": "call", **many},
        {"name": "staggered", "kind": "staggered", "after": 5, **many},
        {"name": "ranks", "kind": "ranks"},
    ]
    hf = lab.reference(model, prompts=prompts, max_new_tokens=NEW_TOKENS, dtype="float32")
    options = {"tp": 2, "eager_mode": mode == "eager", "dtype": "float32", "max_prefill_token_num": 32}
    run = lab.engine(model, steps, environment={"DLINFER_FALLBACK": "error"}, **options)
    for step in ("batch", "staggered"):
        assert compare_tokens(step, run, hf, "float32") == []
    assert run["ranks"] == 2
