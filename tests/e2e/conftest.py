"""End-to-end: unmodified LMDeploy on the CPU against Hugging Face transformers, each in its own process."""

import pytest

from tests.e2e import matrix
from tests.e2e.harness import Lab
from tests.e2e.ledger import Ledger

LEDGER = pytest.StashKey[Ledger]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger(config.cache.mkdir("e2e") / "matrix.jsonl")


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config) -> Lab:
    """Models and references live in pytest's cache folder (``.pytest_cache``, git-ignored) between runs."""
    return Lab(pytestconfig.cache.mkdir("e2e"))


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    return pytestconfig.stash[LEDGER]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Families by configurations: cells passed of cells known, for the code as it is now."""
    entries = config.stash[LEDGER].entries()
    if not entries:
        return
    columns = [*matrix.CONFIGS, "bf16", *matrix.ENGINES]
    table: dict[tuple[str, str], list[bool]] = {}
    for cell in matrix.cells():
        if cell.name in entries:
            table.setdefault((cell.family, cell.column), []).append(not entries[cell.name]["failures"])
    terminalreporter.section("LMDeploy on CPU equals transformers (seeds passed/run)")
    terminalreporter.write_line(f"{'':12}" + "".join(f"{c:>16}" for c in columns))
    for family in dict.fromkeys(name for name, _ in table):
        results = [table.get((family, column)) for column in columns]
        shown = [f"{sum(r)}/{len(r)}" if r else "-" for r in results]
        terminalreporter.write_line(f"{family:12}" + "".join(f"{s:>16}" for s in shown))
