"""docs/reference is what ``make figures`` writes of the code as it is."""

import ast
import re
import sys
import traceback
from pathlib import Path

import pytest

import dlinfer
from dlinfer.errors import SettingError
from dlinfer.ops import registry
from docs.generate import errors_page
from docs.generate.reference import FOLDER, PAGES
from docs.generate.text import fields_of, prose, table


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_what_the_command_writes(name: str) -> None:
    if name == "python.md" and sys.version_info >= (3, 14):
        pytest.skip("CPython 3.14 writes the types of signatures in another way")
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make figures`"


def test_every_page_of_the_reference_is_generated() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.md")) == sorted(PAGES)


def test_every_error_has_an_entry() -> None:
    entries = set(re.findall(r"^### (\w+)$", (FOLDER / "errors.md").read_text(), re.MULTILINE))
    kinds = {"DlinferError"}
    trees = [ast.parse(path.read_text()) for path in Path(dlinfer.__file__).parent.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # subclasses of subclasses
        kinds |= {
            node.name
            for node in classes
            if any(isinstance(base, ast.Name) and base.id in kinds for base in node.bases)
        }
    assert kinds - {"DlinferError"} == entries


@pytest.mark.parametrize("name", registry())
def test_an_op_has_the_signature_that_a_kernel_must_have(name: str) -> None:
    """The last signature of its entry has the parameters that vendors' kernels are checked for."""
    entry = (FOLDER / "ops.md").read_text().partition(f"### {name}\n")[2].partition("\n### ")[0]
    signatures = re.findall(rf"```text\n{name}(\(.*?)\n```", entry, re.DOTALL)
    tree = ast.parse(f"def {name}{signatures[-1]}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert tuple(argument.arg for argument in tree.args.args) == registry()[name].parameters


def test_a_traceback_ends_with_the_entry_of_the_error() -> None:
    error = SettingError(variable="DLINFER_X", given="1", expected="2")
    last = traceback.format_exception(error)[-1].strip()
    page, _, anchor = last.removeprefix("See ").partition("#")
    assert Path(page) == Path("docs/reference") / errors_page.NAME
    assert anchor == "settingerror"
    assert "See " not in str(error)


def test_errors_of_other_packages_name_no_page_of_ours() -> None:
    class OtherError(SettingError):
        __module__ = "other.errors"

    assert not hasattr(OtherError(variable="X", given="1", expected="2"), "__notes__")


def test_docstrings_become_markdown() -> None:
    doc = """First line.

    x, y: sizes, a * b. Returns ``x``.
    name: one thing
        that goes on.
    """
    assert (
        prose(doc)
        == "First line.\n\n- `x`, `y`: sizes, a \\* b.\n\nReturns `x`.\n\n- `name`: one thing that goes on."
    )
    assert fields_of(doc, ["x", "y", "name"])["name"] == "one thing that goes on."
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
