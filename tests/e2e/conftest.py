"""End-to-end: unmodified LMDeploy on the CPU against Hugging Face transformers, each in its own process."""

import pytest

from tests.caches import kept_folder
from tests.e2e import matrix
from tests.e2e.cell_jobs import Answers, answers
from tests.e2e.harness import Lab
from tests.e2e.ledger import Ledger

LEDGER = pytest.StashKey[Ledger]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger(kept_folder(config) / "matrix.jsonl")


@pytest.fixture(scope="session")
def gate_answers(lab: Lab, request: pytest.FixtureRequest) -> Answers:
    """Answers to all cells that are asked for in this run, from as few processes as they need.

    Families of positions answer a batch; ``make test-full`` asks them the rest.
    """
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    cells = [
        cell
        for item in items
        if "gate_answers" in item.fixturenames
        and isinstance(cell := item.callspec.params["cell"], matrix.Cell)
    ]
    asked: dict[matrix.Cell, tuple[str, ...]] = {
        cell: () if cell.is_quick else ("batch",) for cell in cells if not cell.missing
    }
    return answers(lab, asked)


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    return pytestconfig.stash[LEDGER]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Families by configurations: cells passed of cells known, for the code as it is now, and when one ran last."""
    ledger = config.stash[LEDGER]
    if "full" not in config.option.markexpr or "not full" in config.option.markexpr:
        return
    entries = ledger.entries()
    columns = [*matrix.CONFIGS, "bf16", *matrix.ENGINES]
    table: dict[tuple[str, str], list[bool]] = {}
    for cell in matrix.cells():
        if cell.name in entries:
            table.setdefault((cell.family, cell.column), []).append(not entries[cell.name]["failures"])
    terminalreporter.section("LMDeploy on CPU equals transformers (seeds passed/run with this code)")
    known = sum(not cell.is_quick for cell in matrix.cells())
    passed = sum(not entry["failures"] for entry in entries.values())
    terminalreporter.write_line(f"{passed} of {known} cells passed; last run: {ledger.last() or 'never'}")
    terminalreporter.write_line(f"{'':12}" + "".join(f"{c:>16}" for c in columns))
    for family in dict.fromkeys(name for name, _ in table):
        results = [table.get((family, column)) for column in columns]
        shown = [f"{sum(r)}/{len(r)}" if r else "-" for r in results]
        terminalreporter.write_line(f"{family:12}" + "".join(f"{s:>16}" for s in shown))
