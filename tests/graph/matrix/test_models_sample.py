"""Of each kind of model one from the matrix; ``make graph-models`` runs all of them."""

import pytest

from tests.graph.matrix.run_models import job
from tests.graph.matrix.verdict import failures

LIMIT = 1800.0
"""Seconds for one model: some tens on a machine that has nothing else to do."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]

DECODER, ENCODER, VISION = "llama", "bert", "vit"


@pytest.mark.full
@pytest.mark.parametrize("name", (DECODER, ENCODER, VISION))
def test_compiled_model_equals_eager(name: str) -> None:
    """The quick lane has decoders through LMDeploy and ``generate``, and blocks of all three in the engines' tests."""
    record = job(name, "dlinfer", limit=LIMIT)
    assert not failures(record), record
