"""docs/reference/errors.md: every error class with its text and its next step."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import dlinfer
from dlinfer import errors
from dlinfer.errors import DlinferError
from docs.generate.text import page, plain

NAME = "errors.md"
PACKAGE = Path(dlinfer.__file__).parent
ALONE = ("dlinfer.graph.engine", "dlinfer.graph.lowering.apart", "dlinfer.cli.new_vendor")
"""Modules that define one error beside what raises it."""

BEFORE = """\
Each error is a `dlinfer.errors.DlinferError`. Its text says what is wrong and, after "Next step:", what to do.
`error.fields` has the values that the text names, `error.explanation` and `error.step` the two parts of the text.
Errors can be pickled. Tracebacks end with the error's place on this page."""


def modules() -> Iterator[ModuleType]:
    """The modules that define errors; the one for everybody first."""
    yield errors
    for path in sorted(PACKAGE.rglob("errors.py")):
        name = ".".join(("dlinfer", *path.relative_to(PACKAGE).with_suffix("").parts))
        if name != errors.__name__:
            yield importlib.import_module(name)
    yield from map(importlib.import_module, ALONE)


def classes(module: ModuleType) -> list[type[DlinferError]]:
    """The errors that a module defines, in the order of its source."""
    found = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, DlinferError) and kind.__module__ == module.__name__
    ]
    return [kind for kind in found if kind is not DlinferError]


def _sections() -> Iterator[tuple[str, list[type[DlinferError]]]]:
    """Heading and classes. In dlinfer.errors, comments ``# --- name`` begin sections."""
    source = inspect.getsource(errors)
    starts = [(match.start(), match[1]) for match in re.finditer(r"^# --- (.+)$", source, re.MULTILINE)]
    for (start, title), (end, _) in zip(starts, [*starts[1:], (len(source), "")], strict=True):
        names = re.findall(r"^class (\w+)", source[start:end], re.MULTILINE)
        yield title.capitalize(), [vars(errors)[name] for name in names]
    for module in modules():
        if module is not errors and (kinds := classes(module)):
            yield f"Module `{module.__name__}`", kinds


def _entry(kind: type[DlinferError]) -> str:
    bases = [base.__name__ for base in kind.__bases__ if base is not DlinferError]
    lines = [f"### {kind.__name__}", plain(" ".join(inspect.cleandoc(kind.__doc__ or "").split()))]
    lines.append(f"```text\n{kind.message}\n```")
    if kind.next_step:
        lines.append(f"Next step: {plain(kind.next_step)}")
    if bases:
        lines.append(f"Also a {' and a '.join(f'`{base}`' for base in bases)}.")
    return "\n\n".join(lines)


def document() -> str:
    parts = [BEFORE]
    for title, kinds in _sections():
        parts += [f"## {title}", *map(_entry, kinds)]
    return page(
        "Errors", "For everybody who met an error of dlinfer's: what it means and what to do.", *parts
    )
