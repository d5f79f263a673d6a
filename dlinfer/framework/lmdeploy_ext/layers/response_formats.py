"""Formats of answers that LMDeploy before 0.18 cannot follow: there they are an error of the step, for every request.

Later releases compile a format when its request comes, and refuse that alone.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any


def fault(style: Mapping[str, Any]) -> str | None:
    """Why a request's ``response_format`` cannot be followed, in a line; None where it can."""
    kind = style.get("type")
    if not isinstance(kind, str) or kind not in _READ:
        return f"no type {kind!r}"
    try:
        _READ[kind](style)
    except (RuntimeError, ValueError, TypeError, KeyError) as cause:  # xgrammar's own are RuntimeErrors
        lines = str(cause).strip().splitlines()
        return lines[0] if lines else type(cause).__name__
    return None


def _read_schema(style: Mapping[str, Any]) -> None:
    from xgrammar import Grammar

    schema = style["json_schema"]
    for key in ("json_schema", "schema"):
        if isinstance(schema, dict) and key in schema:
            schema = schema[key]
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, dict):
        raise TypeError("a JSON schema is an object")
    Grammar.from_json_schema(json.dumps(schema))


def _read_pattern(style: Mapping[str, Any]) -> None:
    from xgrammar import Grammar

    Grammar.from_regex(style.get("regex_schema") or "")


def _read_tag(style: Mapping[str, Any]) -> None:
    from xgrammar import Grammar

    tag = style.get("structural_tag", {})
    Grammar.from_structural_tag(tag if isinstance(tag, str) else json.dumps(tag))


_READ: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "json_schema": _read_schema,
    "regex_schema": _read_pattern,
    "json_object": lambda style: None,
    "structural_tag": _read_tag,
}
