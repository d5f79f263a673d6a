"""DeepSeek's sparse attention through LMDeploy's other path: projections of their own, which rotate before they turn.

The cells of ``deepseek_v32`` and ``glm_moe_dsa`` (``make models``, ``make test-full``) have the joint projection.
"""

import pytest

from tests.e2e.cell_checks import check_decisive, compare_tokens
from tests.e2e.cell_jobs import hf_job
from tests.e2e.harness import NEW_TOKENS, Lab
from tests.e2e.matrix import STRICT, Cell

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]

APART = {"LMDEPLOY_DISABLE_DSA_INDEXER_FUSION": "1"}


@pytest.mark.full
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_tokens_equal_transformers_where_projections_are_not_joined(family: str, mode: str, lab: Lab) -> None:
    cell = Cell(family, 3, "float32", "base", mode)
    model, job = hf_job(lab, cell)
    said = lab.reference(model, **job)
    gen = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    steps = [{"name": "batch", "kind": "call", "prompts": job["prompts"], "gen": gen}]
    run = lab.engine(model, steps, environment=STRICT | APART, eager_mode=mode == "eager", session_len=1024)
    assert check_decisive(said) + compare_tokens("batch", run, said, "float32") == []
    assert (run["graphs"]["steps"] > 0) == (mode == "graph")
