"""Every page of docs/ that the code or a message names is there."""

import re

from tests.architecture.imports import REPOSITORY

FOLDERS = ("benchmarks", "dlinfer", "docs", "examples", "tests")
PAGE = re.compile(r"(?<![\w/.-])docs/[\w/]+\.(?:md|svg)")


def test_pages_that_are_named_exist():
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    files += [REPOSITORY / name for name in ("Makefile", "pyproject.toml")]
    missing = {
        f"{path.relative_to(REPOSITORY)}: {page}"
        for path in files
        for page in PAGE.findall(path.read_text())
        if not (REPOSITORY / page).exists()
    }
    assert missing == set()
