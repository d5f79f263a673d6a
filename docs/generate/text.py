"""Docstrings as Markdown, tables, and the heading of a generated page."""

import inspect
import re
from collections.abc import Iterable, Sequence

from dlinfer import errors

NAMES = [
    name for name, kind in vars(errors).items() if isinstance(kind, type) and kind is not errors.DlinferError
]
ERROR = re.compile(rf"\b(?:{'|'.join(name for name in NAMES if name[0].isupper() and name != 'Any')})\b")
"""The errors of dlinfer.errors, which have an entry in the page of errors."""

MARK = "<!-- Written by `make figures` from the code. Do not edit. -->"


def page(title: str, opening: str, *parts: str) -> str:
    """A page: its title, the sentence that says who needs it, and its parts."""
    return "\n\n".join([f"# {title}", MARK, opening, *(part for part in parts if part)]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(text: str) -> str:
    """Text for a cell of a table: one line, no bars."""
    return plain(" ".join(text.split())).replace("|", "\\|")


def plain(text: str) -> str:
    """Docstring markup as Markdown's; what Markdown would read as markup is escaped. Pages and errors become links."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = re.sub(r"^``(.+)``$", r"`\1`", part)
        else:
            escaped = part.replace("*", "\\*").replace("<", "&lt;")
            escaped = re.sub(r"\bdocs/(\w+/\w+\.md)", r"[docs/\1](../\1)", escaped)
            parts[index] = ERROR.sub(lambda found: f"[{found[0]}](errors.md#{found[0].lower()})", escaped)
    return "".join(parts)


def fields_of(doc: str, names: Sequence[str]) -> dict[str, str]:
    """What a docstring says of each name, where it has lines ``name: meaning`` or ``name, other: meaning``."""
    found: dict[str, str] = {}
    known = "|".join(map(re.escape, names)) or "(?!)"
    head = re.compile(rf"(?:(?<=\s)|^)((?:{known})(?:(?:, | and )(?:{known}))*): ", re.MULTILINE)
    for paragraph in inspect.cleandoc(doc).split("\n\n"):
        starts = [match for match in head.finditer(paragraph) if _begins(paragraph, match.start())]
        for match, following in zip(starts, [*starts[1:], None], strict=False):
            text = paragraph[match.end() : following.start() if following else None]
            for name in re.split(r", | and ", match[1]):
                found[name] = " ".join(text.split())
    return found


def _begins(text: str, place: int) -> bool:
    """Whether a sentence begins there."""
    before = text[:place].rstrip()
    return not before or before.endswith((".", ";", ":")) or text[:place].endswith("\n")


def prose(doc: str) -> str:
    """A docstring as paragraphs. A line that begins ``name: `` begins a list item."""
    blocks: list[str] = []
    for paragraph in inspect.cleandoc(doc).split("\n\n"):
        lines: list[str] = []
        apart = re.sub(r"(?<=\.) (?=Returns |Raises |Nothing is mutated)", "\n", paragraph)
        for line in apart.splitlines():
            item = re.match(r"^((?:\w+, )*\w+): (.*)", line)
            if item and item[1][0].islower():
                if lines and not lines[-1].startswith("- "):
                    lines.append("")
                lines.append(f"- {_names(item[1])}: {plain(item[2])}")
            elif line.startswith(" ") and lines:
                lines[-1] += f" {plain(line.strip())}"
            elif lines and not lines[-1].endswith("."):
                lines[-1] += f" {plain(line)}"
            elif lines and lines[-1].startswith("- "):
                lines += ["", plain(line)]
            else:
                lines.append(plain(line))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _names(text: str) -> str:
    return ", ".join(f"`{name}`" for name in text.split(", "))


def summary(doc: str | None) -> str:
    """The first sentence or paragraph of a docstring."""
    return cell(inspect.cleandoc(doc or "").split("\n\n")[0])


def signature(name: str, of: inspect.Signature) -> str:
    """A call as Python source: on one line where that has room, else an argument a line."""
    parameters = [
        str(value) for value in of.replace(return_annotation=inspect.Signature.empty).parameters.values()
    ]
    if any(value.kind is value.KEYWORD_ONLY for value in of.parameters.values()) and not any(
        value.kind is value.VAR_POSITIONAL for value in of.parameters.values()
    ):
        first = next(i for i, v in enumerate(of.parameters.values()) if v.kind is v.KEYWORD_ONLY)
        parameters.insert(first, "*")
    returned = of.return_annotation
    arrow = "" if returned in (inspect.Signature.empty, None) else f" -> {_type(returned)}"
    cleaned = [_short(text) for text in parameters]
    line = f"{name}({', '.join(cleaned)}){arrow}"
    if len(line) > 96:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in cleaned) + f"){arrow}"
    return f"```text\n{line}\n```"


def _type(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _short(text)


def _short(text: str) -> str:
    """Types without their modules, and no quotes around annotations."""
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)
    text = re.sub(r"\btorch\.(?=dtype|device)", "", text)
    return re.sub(r": '([^']+)'", r": \1", text)
