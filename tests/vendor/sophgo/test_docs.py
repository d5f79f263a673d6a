"""docs/sophgo.md names every id of S0, and the test file of each names the id."""

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
    """Numbers that a test file names: S0-39, test_s0_39_..., test_s0_68_and_69_..., test_s0_10_to_14_..."""
    found = {int(number) for number in re.findall(r"S0-(\d\d)", text)}
    for first, middle, second in re.findall(r"s0_(\d\d)(?:_(and|to)_(\d\d))?", text):
        last = int(second) if second else int(first)
        found |= set(range(int(first), last + 1)) if middle == "to" else {int(first), last}
    return found


def test_the_test_file_of_a_row_names_its_id():
    missing = [
        name for name, (_, file) in rows().items() if int(name[3:]) not in named((HERE / file).read_text())
    ]
    assert missing == []


def test_the_files_of_a_row_are_there():
    folder = DOCS.parents[1] / "dlinfer/vendor/sophgo"
    for where, file in rows().values():
        assert (HERE / file).exists()
        for name in where.split(", "):
            assert name == "this file" or (folder / "sail" / name).exists() or (folder / name).exists(), name


def test_the_errors_of_the_table_are_ours():
    for name in re.findall(r"`(Sophgo\w+Error)`", DOCS.read_text()):
        assert hasattr(errors, name)
