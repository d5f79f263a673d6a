"""docs/reference/engines.md: graph engines, their vendors and their options."""

import inspect
from dataclasses import fields
from typing import Any

from dlinfer.graph.engine_kit.options import EngineOptions, ExpectedError
from dlinfer.graph.options import CompileOptions
from dlinfer.vendor import discovery
from dlinfer.vendor.base import Vendor
from docs.generate.text import cell, fields_of, page, plain, table

NAME = "engines.md"
PAGES = {"inductor": "cpu"}
"""Engine -> the page of docs/vendors that describes it, where that is not its own name."""

BEFORE = """\
A graph engine runs the parts of a compiled model that it takes. [Use an engine](../guides/use_an_engine.md) shows how
to choose one; `dlinfer doctor` shows which can run here. Options go in `options={"engine_options": {...}}`, or in
`DLINFER_ENGINE_OPTIONS` as `name=value,name=value` for the engine that `DLINFER_ENGINE` names. A wrong name or value
raises [`CompileOptionError`](errors.md#compileoptionerror), which lists what is allowed."""


def vendors() -> list[Vendor]:
    """dlinfer's own vendors that bring engines."""
    found = [discovery.get(name) for name in discovery.names()]
    return [vendor for vendor in found if vendor.engines and _is_ours(vendor)]


def _is_ours(vendor: Vendor) -> bool:
    origin = discovery.origin(vendor.name)
    return origin is not None and origin.module.startswith("dlinfer.")


def _options(vendor: Vendor, engine: str) -> type[EngineOptions] | None:
    """The engine's options; None where it has none, or cannot be loaded without its SDK."""
    assert vendor.load_engine is not None
    try:
        kind = getattr(vendor.load_engine(engine), "options_type", None)
    except ImportError:
        return None
    return kind if kind is not None and fields(kind) else None


def _takes(item: Any) -> str:
    """What an option takes, in the words of its own error."""
    try:
        item.metadata["read"](object())
    except ExpectedError as error:
        return cell(str(error))
    return ""


def _default(value: object) -> str:
    if value is None or value == "":
        return "none"
    return f"`{', '.join(map(str, value))}`" if isinstance(value, tuple) else f"`{value}`"


def _entry(vendor: Vendor, engine: str) -> str:
    where = f"../vendors/{PAGES.get(engine, engine)}.md"
    kind = _options(vendor, engine)
    default = " It is this vendor's default engine." if vendor.default_engine == engine else ""
    text = f"## {engine}\n\nVendor `{vendor.name}`, for tensors on device `{vendor.device_type}`.{default} "
    text += f"[What it takes and what differs]({where})."
    if kind is None:
        return text + " It has no options."
    doc = inspect.getdoc(kind) or ""
    own = [item for item in fields(kind) if "read" in item.metadata]
    if not own:
        return f"{text}\n\n{plain(doc)}"
    meanings = fields_of(doc, [item.name for item in own])
    rows = [
        (f"`{item.name}`", _default(item.default), _takes(item), cell(meanings.get(item.name, "")))
        for item in own
    ]
    return f"{text}\n\n{table(('option', 'default', 'takes', 'meaning'), rows)}"


def document() -> str:
    meanings = fields_of(inspect.getdoc(CompileOptions) or "", [item.name for item in fields(CompileOptions)])
    common = [(f"`{name}`", cell(meaning)) for name, meaning in meanings.items()]
    entries = [_entry(vendor, engine) for vendor in vendors() for engine in vendor.engines]
    return page(
        "Engines and options",
        "For everybody who compiles a model: the graph engines and every option they take.",
        BEFORE,
        "## Options of every compilation",
        'For `torch.compile(model, backend="dlinfer", options={...})` and `dlinfer.compile(..., engine=...)`.',
        table(("option", "meaning"), common),
        *entries,
    )
