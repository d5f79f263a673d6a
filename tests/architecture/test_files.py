"""Files are short and documented, folders hold a dozen files or files of one kind."""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.imports import PACKAGE, REPOSITORY

MOST_LINES = 500
MOST_FILES = 15
# Folders whose files are all of one kind: one op, rule, lowering or translation each.
OF_ONE_KIND = {
    "dlinfer/ops",
    "dlinfer/graph/passes/fusion",
    "dlinfer/vendor/openvino/lowerings",
}


def test_files_are_short_and_say_what_they_are():
    long = {
        path: count
        for path in PACKAGE.rglob("*.py")
        if (count := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [path for path, text in texts.items() if text and not ast.get_docstring(ast.parse(text))] == []


def test_folders_hold_a_dozen_files_or_files_of_one_kind():
    counts = {
        str(folder.relative_to(REPOSITORY)): sum(
            path.suffix in (".py", ".cpp", ".h") for path in folder.iterdir()
        )
        for folder in [PACKAGE, *PACKAGE.rglob("*/")]
        if folder.name != "__pycache__"
    }
    assert {
        name: count for name, count in counts.items() if count > MOST_FILES and name not in OF_ONE_KIND
    } == {}


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions and classes of a file, and the public methods of those classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").glob("*.py")), ids=lambda path: path.name)
def test_public_names_of_ops_are_documented(path):
    definitions = public_definitions(ast.parse(path.read_text()))
    missing = [name for name, node in definitions if not ast.get_docstring(node)]
    assert missing == []


def test_every_op_documents_every_parameter():
    from dlinfer import ops

    missing = [
        f"{op.name}: {parameter}"
        for op in ops.registry().values()
        for parameter in op.parameters
        if parameter not in (op.__doc__ or "") + (op.reference.__doc__ or "")
    ]
    assert missing == []
