"""docs/reference/json.md: what ``--json`` prints, from the dataclasses that are printed."""

import inspect
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from dlinfer.cli import doctor
from dlinfer.conformance import result
from dlinfer.explanation.fields import Facts
from dlinfer.framework.lmdeploy_ext.contract import drift
from dlinfer.framework.lmdeploy_ext.preflight import check
from dlinfer.framework.lmdeploy_ext.quantise import loss, run
from docs.generate.text import cell, fields_of, page, plain, summary, table

NAME = "json.md"
BEFORE = """\
Each command prints one JSON object. `schema` counts versions: within one number keys are added, never removed or
changed. A command that fails prints an object with `error`, `text` and `next_step`."""
SECTIONS: dict[str, tuple[type, ...]] = {
    "dlinfer doctor": (doctor.Report,),
    "dlinfer preflight": (check.Report,),
    "dlinfer quantise": (run.Report,),
    "dlinfer quantise with loss": (loss.Loss,),
    "dlinfer contract": (drift.Report,),
    "dlinfer conformance": (result.Header, result.Result),
    "dlinfer explain": (Facts,),
}
WORDS = {
    "dlinfer conformance": "The object has `schema`, the keys of `Header`, `holds` (no claim failed and one "
    "passed), `seconds`, `counts` (state: how many) and `results`, a list of `Result`.",
    "dlinfer explain": "The same object is `Explanation.to_json()`; `Explanation.from_json` reads it. "
    "Besides the keys below it has `fired`, `coverage`, `flop_coverage`, and as indices of graphs `recompiles` and "
    "`size_1_variants`.",
}


def document() -> str:
    parts = [BEFORE]
    for title, roots in SECTIONS.items():
        parts += [f"## {title}", WORDS.get(title, "")]
        seen: list[type] = []
        for root in roots:
            _collect(root, seen)
        for kind in seen:
            parts += list(_entry(kind, alone=kind is roots[0] and len(roots) == 1))
    return page("JSON", "For everybody who reads what `--json` prints from a program: every key.", *parts)


def _collect(kind: type, seen: list[type]) -> None:
    """The dataclass and those in its fields, in the order of their use."""
    if kind in seen:
        return
    seen.append(kind)
    for hint in typing.get_type_hints(kind).values():
        for part in (hint, *_parts(hint)):
            if is_dataclass(part):
                _collect(typing.cast(type, part), seen)


def _parts(hint: Any) -> Iterator[Any]:
    for part in typing.get_args(hint):
        yield part
        yield from _parts(part)


def _entry(kind: type, alone: bool) -> Iterator[str]:
    doc = inspect.getdoc(kind) or ""
    names = [item.name for item in fields(kind) if not item.name.startswith("_")]
    meanings = fields_of(doc, names)
    if not alone:
        yield f"### {kind.__name__}"
    opening = summary(doc)
    if not any(opening.startswith(f"{name}:") for name in names):
        yield plain(opening)
    hints = typing.get_type_hints(kind)
    yield table(
        ("key", "value", "meaning"),
        [(f"`{name}`", cell(_words(hints[name])), cell(meanings.get(name, ""))) for name in names],
    )


def _words(hint: Any) -> str:
    """A type in JSON's words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, tuple):
        inner = _words(arguments[0])
        return f"list of {inner}"
    if origin is dict:
        return f"object of {_words(arguments[1])}"
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if arguments:
        return " or ".join(_words(part) for part in arguments)
    plain_words = {str: "text", int: "number", float: "number", bool: "true or false", type(None): "null"}
    return plain_words.get(hint, getattr(hint, "__name__", "any").replace("Any", "any"))
