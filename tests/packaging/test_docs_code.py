"""Python in the documents runs, commands that they show exist, and every link leads somewhere."""

import argparse
import ast
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer.cli import parser_of_all
from docs.generate import cli_page
from examples.tiny_models.build import build
from tests.embedding import tiny
from tests.torch_releases import IS_2_12

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
RUN = re.compile(r"(?<!-->\n)```python\n(.*?)```", re.DOTALL)
"""Blocks that run: all but those behind a comment, ``<!-- not run: why -->``."""

FOLDERS = ("start", "guides", "reference")


def path_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def running() -> list[Path]:
    pages = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    return [page for page in pages if RUN.search(page.read_text())]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder that a page names -> a tiny model in its place."""
    folder = tmp_path_factory.mktemp("models")
    build("qwen2", folder / "qwen2")
    tiny.sentence_files(tiny.build(folder / "bert", "bert"), "mean")
    tiny.build(folder / "reranker", "bert", "ForSequenceClassification", num_labels=1)
    names = {"model": "qwen2", "embedding-model": "bert", "reranker": "reranker"}
    return {f"/path/to/{name}": folder / built for name, built in names.items()}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if len(page.relative_to(ROOT).parts) == 3], ids=path_of
)
def test_a_page_opens_with_who_needs_it(page: Path) -> None:
    paragraphs = [part for part in page.read_text().split("\n\n")[1:] if not part.startswith("<!--")]
    if page.parent.name != "internals":
        assert re.match(r"For [^.]*[.:]", paragraphs[0]), paragraphs[0]


@pytest.mark.parametrize("page", PAGES, ids=path_of)
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


@pytest.mark.slow
@pytest.mark.parametrize("page", running(), ids=path_of)
def test_the_blocks_of_a_page_run(page: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """One after another in one script, as a reader types them, with a tiny random model."""
    if IS_2_12 and page.name == "artifacts.md":
        pytest.skip("torch 2.12 guards on the length where keys are repeated for several heads")
    code = "\n\n".join(RUN.findall(page.read_text()))
    for name, folder in folders.items():
        code = code.replace(f'"{name}"', f'"{folder}"')
    script = tmp_path / "page.py"
    script.write_text(code)
    ended = subprocess.run(
        [sys.executable, str(script)], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_commands_that_it_shows_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for line in re.findall(r"^\$ (.*?[^\\])$", block, re.MULTILINE | re.DOTALL):
            words = shlex.split(line.replace("\\\n", " "), comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):  # variables in front
                words.pop(0)
            if words[0] == "make":
                assert [word for word in words[1:] if "=" not in word and word not in targets] == [], line
            elif words[0] == "dlinfer":
                _parse(words[1:], line)


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_options_that_it_names_exist(page: Path) -> None:
    """Of commands that stand within a sentence."""
    commands = {command.prog.split()[1]: command for command, _ in cli_page.commands(parser_of_all())}
    for name, rest in re.findall(r"`dlinfer ([a-z-]+)([^`]*)`", page.read_text()):
        options = {option for action in commands[name]._actions for option in action.option_strings}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, f"dlinfer {name}{rest}"


def _parse(words: list[str], line: str) -> None:
    try:
        parser_of_all().parse_args(words)
    except (SystemExit, argparse.ArgumentError) as error:
        pytest.fail(f"{line}: {error!r}")


@pytest.mark.parametrize("page", PAGES, ids=path_of)
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
