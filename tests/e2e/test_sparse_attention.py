"""DeepSeek's sparse attention through LMDeploy's other path, projections of their own, and in bfloat16.

The cells of ``deepseek_v32`` and ``glm_moe_dsa`` (``make models``, ``make test-full``) have the joint projection, in
float32.
"""

import numpy as np
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


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_in_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(family: str, lab: Lab) -> None:
    """Token by token they may not be: where a score is rounded past another, another token is attended to."""
    model = lab.model(family, 3, "bfloat16")
    texts = [lab.tokenizer(model).encode(text).ids for text in lab.prompts(model, (60, 200, 300))]
    rounded, exact = (lab.reference(model, score=texts, dtype=dtype) for dtype in ("bfloat16", "float32"))
    step = {"name": "logits", "kind": "teacher_forced", "sequences": texts}
    run = lab.engine(model, [step], environment=STRICT, eager_mode=True)
    assert len(run["logits"]) == len(texts)
    for i in range(len(texts)):
        ours, theirs = (
            np.median(np.abs(logits - exact[f"logits_{i}"]).max(-1))
            for logits in (run.logits[f"logits/{i}"], rounded[f"logits_{i}"])
        )
        assert ours < 1.3 * theirs, (i, ours, theirs)
