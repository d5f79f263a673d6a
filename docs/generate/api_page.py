"""docs/reference/python.md: the Python interface, from the docstrings."""

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
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
    "Embeddings and reranking": ("dlinfer.embedding.load", "dlinfer.embedding.TextModel"),
    "Hugging Face transformers": (
        "dlinfer.transformers.optimize",
        "dlinfer.transformers.register_attention",
        "dlinfer.transformers.Packing",
        "dlinfer.transformers.Pages",
    ),
    "Vendors": (
        "dlinfer.vendor.use",
        "dlinfer.vendor.active",
        "dlinfer.vendor.names",
        "dlinfer.vendor.get",
        "dlinfer.ops.core.fallback.counts",
    ),
    "Settings": ("dlinfer.settings.current", "dlinfer.settings.override"),
    "Write a vendor": (
        "dlinfer.vendor.Vendor",
        "dlinfer.vendor.Probe",
        "dlinfer.vendor.KVCacheLayout",
        "dlinfer.vendor.Device",
        "dlinfer.vendor.DeviceMemory",
        "dlinfer.vendor.Claim",
        "dlinfer.vendor.base.refuses",
        "dlinfer.vendor.base.in_order",
        "dlinfer.vendor.reasons",
    ),
    "Write an engine": (
        "dlinfer.graph.engine.Engine",
        "dlinfer.graph.engine_kit.value_engine.ValueEngine",
        "dlinfer.graph.engine_kit.value_region.Lowered",
        "dlinfer.graph.functional.functionalize.Function",
        "dlinfer.graph.engine_kit.onnx_engine.OnnxEngine",
        "dlinfer.graph.onnx.weights.OnnxModel",
        "dlinfer.graph.engine_kit.options.EngineOptions",
        "dlinfer.graph.engine_kit.refused.RefusedError",
    ),
}


def find(path: str) -> Any:
    """The object of a dotted path, which is a module or begins with one."""
    module, _, name = path.rpartition(".")
    try:
        parent = importlib.import_module(module)
        return getattr(parent, name) if hasattr(parent, name) else importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(find(module), name)


def _base(kind: type) -> type | None:
    """The base class that has an entry of its own."""
    entries = {path.rpartition(".")[2] for paths in SECTIONS.values() for path in paths}
    return next((base for base in kind.__mro__[1:] if base.__name__ in entries), None)


def _methods(kind: type | ModuleType) -> list[tuple[str, str]]:
    """Public methods and properties with what they do, or a module's functions.

    Those of base classes of dlinfer's too, but not of a base class that has an entry.
    """
    rows = []
    base = _base(kind) if isinstance(kind, type) else None
    for name, member in inspect.getmembers(kind):
        function = member.fget if isinstance(member, property) else member
        inherited = getattr(base, name, None)
        if inherited is not None and (inherited is member or not function.__doc__):
            continue
        if isinstance(kind, ModuleType) and getattr(member, "__module__", "") != kind.__name__:
            continue
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
    parts = [f"### {short}", prose(inspect.getdoc(kind) or "")]
    if isinstance(kind, ModuleType):
        parts.insert(1, f"```text\nimport {path}\n```")
        return "\n\n".join([*parts, table(("function", "what it does"), _methods(kind))])
    parts.insert(1, signature(path, _signature(kind)))
    if isinstance(kind, type) and (base := _base(kind)):
        parts.append(f"Its base class is [{base.__name__}](#{base.__name__.lower()}).")
    if isinstance(kind, type) and (rows := _methods(kind)):
        parts.append(table(("member", "what it does"), rows))
    return "\n\n".join(parts)


def _signature(kind: Callable[..., Any]) -> inspect.Signature:
    found = inspect.signature(kind)
    public = [value for name, value in found.parameters.items() if not name.startswith("_")]
    hidden = [value.replace(default=...) if _long(value) else value for value in public]
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
        "For everybody who calls or extends dlinfer from Python: functions, classes and options. [Ops](ops.md) and "
        "[errors](errors.md) have pages of their own.",
        *parts,
    )
