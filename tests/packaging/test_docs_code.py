"""Python in the documents parses, what it imports of dlinfer is there, and every link leads somewhere."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_imports_of_dlinfer_resolve(page: Path) -> None:
    for block in BLOCK.findall(page.read_text()):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dlinfer"):
                module = importlib.import_module(str(node.module))
                missing = [
                    name.name for name in node.names if name.name != "*" and not hasattr(module, name.name)
                ]
                for name in missing:  # a submodule
                    importlib.import_module(f"{node.module}.{name}")
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("dlinfer"):
                        importlib.import_module(alias.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if heading else []
        anchors = {re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings}
        assert not heading or heading in anchors, link
