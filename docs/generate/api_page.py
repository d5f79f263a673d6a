"""docs/reference/python.md: the Python interface, from the docstrings."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from docs.generate.text import page, prose, signature, summary, table

NAME = "python.md"
SECTIONS: dict[str, tuple[str, ...]] = {
    "Compile and run": (
        "dlinfer.compile",
        "dlinfer.load",
        "dlinfer.bundle",
        "dlinfer.refresh",
        "dlinfer.explain",
    ),
    "Options": ("dlinfer.graph.options.CompileOptions", "dlinfer.runtime.options.SessionOptions"),
    "Artifacts and sessions": (
        "dlinfer.runtime.artifact.artifact.Artifact",
        "dlinfer.runtime.session.session.Session",
        "dlinfer.runtime.session.batch_collector.BatchCollector",
        "dlinfer.runtime.artifact.sealing.new_key",
        "dlinfer.runtime.artifact.sealing.register_decryption",
    ),
    "Explanations": ("dlinfer.explanation.explanation.Explanation",),
    "Hugging Face transformers": (
        "dlinfer.transformers.optimize",
        "dlinfer.transformers.register_attention",
        "dlinfer.transformers.Pages",
    ),
    "Vendors": (
        "dlinfer.vendor.use",
        "dlinfer.vendor.active",
        "dlinfer.vendor.names",
        "dlinfer.vendor.get",
        "dlinfer.vendor.Vendor",
        "dlinfer.vendor.Device",
    ),
    "Settings": ("dlinfer.settings.current", "dlinfer.settings.override"),
}


def find(path: str) -> Any:
    """The object of a dotted path, whose beginning is a module."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(find(module), name)


def _methods(kind: type) -> list[tuple[str, str]]:
    """Public methods and properties with what they do, those of base classes of dlinfer's too."""
    rows = []
    for name, member in inspect.getmembers(kind):
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not getattr(function, "__module__", "").startswith("dlinfer."):
            continue
        if not isinstance(member, property) and not inspect.isroutine(member):
            continue
        rows.append((f"`{name}{_call(member)}`", summary(inspect.getdoc(function))))
    return rows


def _call(member: object) -> str:
    if isinstance(member, property):
        return ""
    assert callable(member)
    names = [
        f"{'*' * (int(value.kind == value.VAR_POSITIONAL) + 2 * int(value.kind == value.VAR_KEYWORD))}{name}"
        for name, value in inspect.signature(member).parameters.items()
        if name not in ("self", "cls")
    ]
    return f"({', '.join(names)})"


def _entry(path: str) -> str:
    kind: Callable[..., Any] = find(path)
    short = path.rpartition(".")[2]
    parts = [f"### {short}", signature(path, _signature(kind)), prose(inspect.getdoc(kind) or "")]
    if isinstance(kind, type) and (rows := _methods(kind)):
        parts.append(table(("member", "what it does"), rows))
    return "\n\n".join(parts)


def _signature(kind: Callable[..., Any]) -> inspect.Signature:
    found = inspect.signature(kind)
    hidden = [value.replace(default=...) if _long(value) else value for value in found.parameters.values()]
    return found.replace(parameters=hidden)


def _long(parameter: inspect.Parameter) -> bool:
    """Whether its default is an object that nobody types."""
    return parameter.default is not parameter.empty and "<" in repr(parameter.default)


def document() -> str:
    parts = []
    for title, paths in SECTIONS.items():
        parts += [f"## {title}", *map(_entry, paths)]
    return page(
        "Python API",
        "For everybody who calls dlinfer from Python: functions, classes and options. [Ops](ops.md) and "
        "[errors](errors.md) have pages of their own.",
        *parts,
    )
