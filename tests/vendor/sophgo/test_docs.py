"""docs/sophgo.md names every id of S0, and the test file of each has a test that names the id."""

import ast
import re
from pathlib import Path

from dlinfer.vendor.sophgo import errors

DOCS = Path(__file__).parents[3] / "docs/sophgo.md"
HERE = Path(__file__).parent
WANTED = [*range(1, 6), *range(10, 15), *range(20, 23), *range(30, 49), *range(60, 71)]


def rows() -> dict[str, tuple[str, str]]:
    """id -> (where, test file)."""
    found = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if re.fullmatch(r"S0-\d\d", cells[0]):
            found[cells[0]] = (cells[2], cells[3])
    return found


def test_every_id_has_a_row():
    assert list(rows()) == [f"S0-{number:02}" for number in WANTED]


def named(text: str) -> set[int]:
    """Numbers that a name or docstring has: S0-39, test_s0_39_..., test_s0_68_and_69_..., test_s0_10_to_14_..."""
    found = {int(number) for number in re.findall(r"S0-(\d\d)", text)}
    for first, middle, second in re.findall(r"s0_(\d\d)(?:_(and|to)_(\d\d))?", text):
        last = int(second) if second else int(first)
        found |= set(range(int(first), last + 1)) if middle == "to" else {int(first), last}
    return found


def of_tests(source: str) -> set[int]:
    """Numbers in the names and docstrings of a file's tests: neither in its comments nor at its head."""
    tests = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return {number for test in tests for number in named(f"{test.name} {ast.get_docstring(test) or ''}")}


def test_only_tests_name_ids():
    source = '"""S0-01"""\n# S0-02\ndef made_s0_03():\n    """S0-04"""\ndef test_s0_05():\n    """S0-10"""\n    "S0-11"'
    assert of_tests(source) == {5, 10}


def test_the_test_file_of_a_row_has_a_test_that_names_its_id():
    missing = [
        name for name, (_, file) in rows().items() if int(name[3:]) not in of_tests((HERE / file).read_text())
    ]
    assert missing == []


def test_s0_70_what_the_document_leaves_open_is_chosen():
    chapter = DOCS.read_text().partition("## What the document leaves open")[2].partition("\n## ")[0]
    chosen = re.findall(r"^- \*\*(.+?)\*\*", chapter, re.MULTILINE)
    assert {"addr_mode", "stage", "dynamic", "input_mems, output_mems"} <= set(chosen)
    for mode in ("0 basic", "1 io_alone", "2 io_tag", "3 io_tag_fuse", "4 io_reloc"):
        assert mode in chapter


def test_the_files_of_a_row_are_there():
    folder = DOCS.parents[1] / "dlinfer/vendor/sophgo"
    for where, file in rows().values():
        assert (HERE / file).exists()
        for name in where.split(", "):
            assert name == "this file" or (folder / "sail" / name).exists() or (folder / name).exists(), name


def test_the_errors_of_the_table_are_ours():
    for name in re.findall(r"`(Sophgo\w+Error)`", DOCS.read_text()):
        assert hasattr(errors, name)
