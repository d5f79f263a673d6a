"""Tokens, scores and scheduling of every model family under every engine option, against transformers."""

import time

import pytest

from tests.e2e.cell_checks import check
from tests.e2e.cell_jobs import Answers, answers
from tests.e2e.harness import Lab
from tests.e2e.ledger import Ledger, code_fingerprint
from tests.e2e.matrix import Cell, cells

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

QUICK = [cell for cell in cells() if cell.is_quick]
REST = [cell for cell in cells() if not cell.is_quick]


@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: cell.name)
def test_quick_cell(cell: Cell, lab: Lab, gate_answers: Answers) -> None:
    """``PytorchEngineConfig(device_type="cpu")`` and nothing else."""
    if cell.missing:
        pytest.skip(cell.missing)
    failures = check(lab, cell, *gate_answers[cell.name])
    assert not failures, "\n".join(failures)


@pytest.mark.full
@pytest.mark.parametrize("cell", REST, ids=lambda cell: cell.name)
def test_cell(cell: Cell, lab: Lab, ledger: Ledger) -> None:
    """An engine of its own. A cell that passed with this very code is skipped, and the reason says when that was."""
    if passed := ledger.passed(cell.name):
        pytest.skip(f"passed with this very code: {passed}")
    if cell.missing:
        pytest.skip(cell.missing)
    code, start = code_fingerprint(), time.monotonic()
    try:
        failures = check(lab, cell, *answers(lab, {cell: ()})[cell.name])
    except AssertionError as error:  # a step or a process broke: the table must show that too
        failures = [str(error)]
    ledger.record(cell.name, code, time.monotonic() - start, failures)
    assert not failures, "\n".join(failures)
