"""Of each kind of model one from the matrix; ``make graph-models`` runs all of them."""

import pytest

from tests.graph.matrix.run_models import job
from tests.graph.matrix.verdict import failures

LIMIT = 1800.0
"""Seconds for one model: some tens on a machine that has nothing else to do."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]

DECODER, ENCODER, VISION = "llama", "bert", "vit"


@pytest.mark.parametrize(
    "name", (*(pytest.param(name, marks=pytest.mark.full) for name in (DECODER, ENCODER)), VISION)
)
def test_compiled_model_equals_eager(name: str) -> None:
    """Left to the long lane are the decoder, which the quick one has through LMDeploy and under ``generate``, and the
    encoder, which it has in fusion's tests."""
    record = job(name, "dlinfer", limit=LIMIT)
    assert not failures(record), record
