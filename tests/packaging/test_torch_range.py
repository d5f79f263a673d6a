"""The releases of torch that are admitted, tested and named in the documents are the same."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.workers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADMITTED = next(Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch")).specifier
OLDEST, END = (
    Version(next(one.version for one in ADMITTED if one.operator == operator)) for operator in (">=", "<")
)


def found(pattern: str, file: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert match is not None, f"{file} has no {pattern}"
    return match[1]


def test_the_seams_tests_run_on_both_ends():
    oldest, newest = map(Version, found(r"^SEAM_TORCH \?= (.*)$", "Makefile").split())
    assert oldest == OLDEST
    assert newest in ADMITTED and (newest.major, newest.minor + 1) == (END.major, END.minor)


def test_the_seams_tests_are_where_the_script_runs_them():
    paths = found(r"^ +(tests/.*)$", "requirements/seam.sh").split()
    assert len(paths) == 2
    assert all((ROOT / path).is_file() or list((ROOT / path).glob("test_*.py")) for path in paths)


def test_the_lock_has_a_torch_that_is_admitted():
    assert Version(found(r"^torch==(.*)$", "requirements/lock.txt")) in ADMITTED


@pytest.mark.parametrize("page", ["docs/start/install.md", "docs/vendors/maca.md"])
def test_pages_name_the_range(page):
    assert found(r"torch (\d+\S* to \d+\.\d+)", page) == f"{OLDEST} to {END.major}.{END.minor - 1}"
