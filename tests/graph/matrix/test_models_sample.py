"""A decoder, an encoder and a vision model of the matrix; ``make graph-models`` runs all of them."""

import pytest

from tests.graph.matrix.run_models import job
from tests.graph.matrix.verdict import failures

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ("llama", "bert", "vit"))
def test_compiled_model_equals_eager(name: str) -> None:
    record = job(name, "dlinfer", limit=500.0)
    assert not failures(record), record
