"""docs/qaic.md says of every S3 id where it is served and tested, and lists every option as it is."""

import ast
import re
from pathlib import Path

from dlinfer.vendor.qaic.options.table import ROWS

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs" / "qaic.md").read_text()
IDS = [f"S3-{number:02}" for number in (*range(1, 7), *range(10, 16), *range(20, 33))]
PROOFS = {"onnxruntime", "stand-in", "documented"}


def files_by_id() -> dict[str, set[str]]:
    """id -> files with a test that names it."""
    found: dict[str, set[str]] = {}
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in re.findall(r"s3_(\d\d)", node.name):
                    found.setdefault(f"S3-{number}", set()).add(path.name)
    return found


def rows() -> dict[str, list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| S3-")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_every_id_has_a_row_that_names_its_tests_and_how_it_is_proven():
    assert list(rows()) == IDS
    for number, (_, where, files, proven) in rows().items():
        assert files in files_by_id()[number], number
        assert set(proven.split(", ")) <= PROOFS, number
        assert where


def test_every_id_has_a_test():
    assert set(IDS) == files_by_id().keys()


def test_the_options_are_listed_as_they_are():
    listed = PAGE.partition("| option | takes | stage | meaning |")[2].splitlines()[2:]
    assert listed == [f"| `{row.name}` | {row.kind.words} | {row.stage} | {row.doc} |" for row in ROWS]


def test_it_says_that_no_card_was_used():
    assert "No Cloud AI card was used" in PAGE
