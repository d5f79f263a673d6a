"""docs/megengine.md says of every S1 id where it is served and tested, and what the library lacks."""

import ast
import re
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
PAGE = (REPOSITORY / "docs" / "megengine.md").read_text()
GAPS = ((1, 6), (10, 21), (30, 44), (50, 65), (70, 74), (80, 102), (110, 122), (130, 138))
IDS = [f"S1-{number:02}" for first, last in GAPS for number in range(first, last)]


@lru_cache(maxsize=1)
def files_by_id() -> dict[str, set[str]]:
    """id -> files with a test that names it."""
    found: dict[str, set[str]] = {}
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in re.findall(r"s1_(\d+)", node.name):
                    found.setdefault(f"S1-{number}", set()).add(path.name)
    return found


def rows() -> dict[str, list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| S1-")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_every_id_has_a_row_that_names_its_code_and_its_tests():
    assert list(rows()) == IDS
    for number, (_, where, files, verdict) in rows().items():
        assert files in files_by_id()[number], number
        for name in re.findall(r"`([^`]+)`", where):
            assert (REPOSITORY / "dlinfer/vendor/megengine/lite" / name).is_file(), number
        assert verdict.startswith(("work", "0", "the library itself lacks it")), number


def test_every_id_has_a_test():
    assert set(IDS) == files_by_id().keys()


def test_it_says_where_it_was_run():
    assert "No GPU was used" in PAGE
