"""Tokens, scores and scheduling of every model family under every engine option, against transformers."""

import time

import pytest

from tests.e2e.harness import Lab
from tests.e2e.ledger import Ledger, code_fingerprint
from tests.e2e.matrix import Cell, cells, check

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]


def as_param(cell: Cell):
    return pytest.param(cell, id=cell.name, marks=() if cell.is_quick else pytest.mark.full)


@pytest.mark.parametrize("cell", [as_param(cell) for cell in cells()])
def test_cell(cell: Cell, lab: Lab, ledger: Ledger) -> None:
    """``PytorchEngineConfig(device_type="cpu")`` and nothing else: tokens equal transformers'.

    Cells of the long lane that passed with this very code are not run again.
    """
    if not cell.is_quick and ledger.passed(cell.name):
        print(f"{cell.name} passed earlier with this code: see {ledger.path}")
        return
    if cell.missing:
        pytest.skip(cell.missing)
    code, start = code_fingerprint(), time.monotonic()
    try:
        failures = check(lab, cell)
    except AssertionError as error:  # a step or a process broke: the table must show that too
        failures = [str(error)]
    ledger.record(cell.name, code, time.monotonic() - start, failures)
    assert not failures, "\n".join(failures)
