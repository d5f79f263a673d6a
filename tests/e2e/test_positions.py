"""Tokens of every rope type and window equal transformers', with prompts on both sides of the original length.

All engines share one process, since a start costs more than what these models compute. ``make test-full`` runs the
same families as cells of the matrix, in graph mode too, with prompts in chunks and with shared blocks.
"""

import pytest

from examples.tiny_models.families import POSITIONAL
from tests.e2e.harness import EngineRun, Lab
from tests.e2e.matrix import (
    compare_positions,
    positional_cells,
    positional_job,
    positional_options,
    positional_steps,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

# Lengths as an input of the graph, and windows of some layers only.
GRAPHS = ("phi3_longrope", "gemma3_window")

CELLS = {
    cell.family: cell
    for cell in positional_cells()
    if cell.config == "base" and (cell.mode == "graph") == (cell.family in GRAPHS)
}


@pytest.fixture(scope="module")
def runs(lab: Lab) -> dict[str, tuple[EngineRun, dict]]:
    """Of each family, what its engine answered to all prompts at once, and what HF did."""
    jobs = [positional_job(lab, cell) for cell in CELLS.values()]
    starts = [
        (model, positional_steps(job)[:1], positional_options(cell))
        for (model, job), cell in zip(jobs, CELLS.values(), strict=True)
    ]
    answers = zip(lab.engines(starts, timeout=1900), lab.references(jobs), strict=True)
    return dict(zip(CELLS, answers, strict=True))


@pytest.mark.parametrize("family", POSITIONAL)
def test_tokens_equal_transformers(family: str, runs: dict[str, tuple[EngineRun, dict]]) -> None:
    run, hf = runs[family]
    failures = compare_positions(run, CELLS[family], hf, ("batch",))
    assert not failures, "\n".join(failures)
