"""Tokens of every rope type and window equal transformers', with prompts on both sides of the original length.

``make test-full`` runs the same families as cells of the matrix, in both modes, with prompts in chunks, with shared
blocks, and one after another.
"""

import pytest

from tests.e2e.cell_checks import check
from tests.e2e.cell_jobs import Answers
from tests.e2e.harness import Lab
from tests.e2e.matrix import Cell, brief_cells

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

# Lengths as an input of the graph, and windows of some layers only.
GRAPHS = ("phi3_longrope", "gemma3_window")

# Their layers have quick tests of their own, and their tokens are compared by ``make test-full`` alone.
IN_FULL = ("glm4_moe", "gpt_oss", "glm_moe_dsa", "deepseek_v4")

CELLS = [
    cell
    for cell in brief_cells()
    if cell.config == "base"
    and cell.family not in IN_FULL
    and (cell.mode == "graph") == (cell.family in GRAPHS)
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.family)
def test_tokens_equal_transformers(cell: Cell, lab: Lab, gate_answers: Answers) -> None:
    failures = check(lab, cell, *gate_answers[cell.name], only=("batch",))
    assert not failures, "\n".join(failures)
