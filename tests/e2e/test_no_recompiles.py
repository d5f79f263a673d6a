"""While requests run nothing is compiled, however batch sizes and lengths change."""

import random

import pytest

from tests.e2e.harness import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

REQUESTS = 500
LEAST_STEPS = 1000


@pytest.mark.full
def test_a_thousand_steps_of_changing_batches_and_lengths_compile_nothing(lab: Lab) -> None:
    """Requests of all lengths come and go, so the batch changes at nearly every step, down to 1 at the end."""
    model = lab.model("llama")
    draw = random.Random(0)
    lengths = [draw.randrange(1, 60) for _ in range(REQUESTS)]
    gens = [{"max_new_tokens": draw.randrange(1, 60), "ignore_eos": True} for _ in lengths]
    gens[-1]["max_new_tokens"] = 200
    step = {"name": "many", "kind": "call", "prompts": lab.prompts(model, tuple(lengths)), "gen": gens}
    run = lab.engine(model, [step])
    assert [len(tokens) for tokens in run.tokens("many")] == [gen["max_new_tokens"] for gen in gens]
    assert run["graphs"]["steps"] >= LEAST_STEPS
    assert run["graphs"]["late"] == 0
