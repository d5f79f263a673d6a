"""Plain English, checked: ``python -m tests.architecture.prose [FOLDER...]`` lists sentences and names to rewrite.

It reads docstrings, comments and messages in Python, comments in C++, and the text of Markdown pages.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.architecture.imports import REPOSITORY

LONGEST = 32
"""Words in a sentence."""

_BEFORE = "of in from to by for with at behind on under through over beside against".replace(" ", "|")
_FIRST = "Written Given Held Kept Refused Compared Counted Asked Left Taken Said Told Made Not In Out Back"
PATTERNS = {
    "a relative clause behind a preposition: make it a sentence of its own": (
        rf"\b(?:{_BEFORE}) (?:which|whom|whose)\b"
    ),
    "two pronouns in a row: name the thing": r"\b(?:that|those|what|this|such as) which\b|\bthat of (?:that|those)\b",
    "a sentence that opens with a clause as its subject: start with the subject": (
        r"^(?:What|Who|Whoever|Whatever|Whichever|That which)\b(?!.*\?$)"
    ),
    "verb before subject: start with the subject": (
        rf"^(?:{_FIRST.replace(' ', '|')}) (?:is|are|was|were|come|comes|go|goes)\b"
    ),
    "a verb without its subject": (
        r"\bis (?:told|said) of\b|\bso that not\b|\band so not\b|\bsays? of (?:it|them|its|a|the)\b"
    ),
}
NAMES = frozenset("made given told found one wanted".split())


class Finding(NamedTuple):
    """One sentence or name to rewrite."""

    path: Path
    line: int
    why: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}: {self.text}"


def findings(paths: Iterable[Path]) -> Iterator[Finding]:
    """Everything to rewrite in these files."""
    for path in paths:
        text = path.read_text()
        if path.suffix == ".py":
            tree = ast.parse(text)
            pieces = [*_strings(tree), *_comments(text)]
            yield from _names(path, tree)
        elif path.suffix == ".md":
            pieces = list(_paragraphs(text))
        else:
            pieces = [
                (text[: match.start()].count("\n") + 1, re.sub(r"(?m)^[ \t]*// ?", "", match[1]))
                for match in _CPP.finditer(text)
            ]
        for line, piece in pieces:
            for sentence in _sentences(piece):
                yield from (Finding(path, line, why, sentence) for why in _faults(sentence))


_CPP = re.compile(r"((?:^[ \t]*//[^\n]*\n)+)", re.M)
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\[([^\]]*)\]\([^)]*\)")
# A sentence ends at its full stop, a paragraph, a list item, and before the label of a field: "name, other: text".
_END = re.compile(
    r"\n\s*(?=\w+(?:, \w+)*: )|(?<=[.;])\s+(?=[a-z_]+(?:, [a-z_]+)*: )|"
    r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z`\"(])|\n\s*\n|\n\s*[-*#>|]\s*"
)


def _sentences(text: str) -> Iterator[str]:
    for part in _END.split(text):
        words = _CODE.sub(lambda match: match[1] or "code", part)
        sentence = " ".join(re.sub(r"^[ \t]*(?://|#)", "", words, flags=re.M).split())
        if sentence:
            yield sentence


def _faults(sentence: str) -> Iterator[str]:
    words = len(re.findall(r"[A-Za-z]+(?:['-][A-Za-z]+)*", sentence))
    if words > LONGEST:
        yield f"{words} words in a sentence: make it two"
    yield from (why for why, pattern in PATTERNS.items() if re.search(pattern, sentence))


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings, and messages: strings that hold a sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 3:
            if not re.fullmatch(r"\(.*\)", node.value):  # a function's signature
                yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield node.lineno, "".join(map(str, parts))


def _comments(text: str) -> Iterator[tuple[int, str]]:
    lines: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(?:fmt|pyright|type|noqa|!)", token.string):
            lines[token.start[0]] = token.string.lstrip("# ")
    for line in sorted(lines):
        if line - 1 not in lines:
            piece = [lines[line]]
            while (after := line + len(piece)) in lines:
                piece.append(lines[after])
            yield line, " ".join(piece)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    line, fenced = 1, False
    for block in re.split(r"\n\s*\n", text):
        fences = block.count("```")
        if not fenced and not fences and "|" not in block and not block.startswith("    "):
            yield line, block
        fenced ^= bool(fences % 2)
        line += block.count("\n") + 2


def _names(path: Path, tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in NAMES:
            yield Finding(path, node.lineno, "a name that says nothing: name the thing", name)  # pyright: ignore[reportAttributeAccessIssue]


def files(folders: Iterable[str]) -> list[Path]:
    """The files with prose in some folders of the repository; a file may be named too."""
    kinds = (".py", ".md", ".cpp", ".h")
    roots = [REPOSITORY / folder for folder in folders]
    below = (path for root in roots for path in ([root] if root.is_file() else root.rglob("*")))
    return sorted(path.relative_to(REPOSITORY) for path in below if path.suffix in kinds)


def main() -> int:
    """Print what is to be rewritten; 1 where there is anything."""
    found_any = 0
    for finding in findings(files(sys.argv[1:] or ("dlinfer", "docs"))):
        print(finding)
        found_any = 1
    return found_any


if __name__ == "__main__":
    raise SystemExit(main())
