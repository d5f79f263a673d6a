"""Write a graph of GE as text that is equal for equal graphs, for reports and golden files.

An op is ``%4 = RmsNorm(x=%0, gamma=%1, epsilon=1e-05) -> y: FLOAT16[n0, 64], rstd: FLOAT[n0, 1]``. ``%4:1`` is its
second result. ``n0`` is the first size that changes between calls. Short constants are inline. torchair's private
attributes, which begin with an underscore, are left out.

Dtypes and sizes come from a result's attribute ``_meta``, which torchair writes. A result without it is shown without
dtype and sizes. If the graph reads only a view of a result, ``_meta`` describes the view.
"""

import re
import struct
import textwrap
import zlib
from collections.abc import Iterator
from typing import Any

from dlinfer.graph.torch_private.symbols import SYMBOL

_WIDTH = 116
_SHOWN_NUMBERS = 8
"""A constant with at most this many elements is written inline."""
_CODES = {"FLOAT": "f", "FLOAT16": "e", "DOUBLE": "d", "INT32": "i", "INT64": "q", "BOOL": "?", "INT8": "b"}


def text_of(graph: Any) -> str:
    """Return the text of torchair's ``GeGraph``, with its ops in order."""
    lines = _Writer().lines(graph)
    return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="    ") for line in lines)


class _Writer:
    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.symbols: dict[str, str] = {}

    def lines(self, graph: Any) -> Iterator[str]:
        shown = []
        for op in graph.op:
            short = short_constant(op)
            self.names[op.name] = short or f"%{len(shown)}"
            shown += [] if short else [op]
        for op in shown:
            operands = [*self._inputs(op), *self._attributes(op)]
            results = ", ".join(self._result(op, desc) for desc in op.output_desc)
            yield f"{self.names[op.name]} = {op.type}({', '.join(operands)})" + (
                f" -> {results}" if results else ""
            )

    def _inputs(self, op: Any) -> Iterator[str]:
        data = [name for name in op.input if not name.endswith(":-1")]
        for value, desc in zip(data, op.input_desc, strict=op.type != "Data"):
            if value:
                yield f"{desc.name}={self._reference(value)}"
        for value in op.input:
            if value.endswith(":-1"):
                yield f"after {self._reference(value.removesuffix(':-1') + ':0')}"

    def _reference(self, value: str) -> str:
        name, _, index = value.rpartition(":")
        return self.names[name] + ("" if index == "0" else f":{index}")

    def _attributes(self, op: Any) -> Iterator[str]:
        for key in sorted(op.attr):
            if not key.startswith("_"):
                yield f"{key}={_value(op.attr[key])}"

    def _result(self, op: Any, desc: Any) -> str:
        name, note = desc.name or "y", meta_of(desc)
        shape = re.search(r"shape=torch\.Size\((\[.*\])\)", note)
        if op.type in ("Const", "Data") and -1 not in desc.shape.dim:  # the note describes its last view
            return f"{name}: {dtype_of(desc)}{list(desc.shape.dim)}"
        if shape is None:
            return name
        sizes = SYMBOL.sub(lambda match: self._symbol(match.group()), shape.group(1))
        return f"{name}: {dtype_of(desc)}{sizes}"

    def _symbol(self, name: str) -> str:
        return self.symbols.setdefault(name, f"n{len(self.symbols)}")


def _value(attribute: Any) -> str:
    kind = attribute.WhichOneof("value")
    value: Any = getattr(attribute, kind) if kind else None
    if kind == "s":
        return repr(value.decode())
    if kind == "f":
        return f"{value:.7g}"
    if kind == "list":
        return str([*(string.decode() for string in value.s), *value.i, *value.f, *value.b, *value.dt])
    if kind == "t":
        return f"crc32 {zlib.crc32(value.data):08x}"
    return str(value).strip()


def short_constant(op: Any) -> str | None:
    """Return a constant of few elements as inline text, such as ``[1, 0]:INT64``; None for any other op."""
    if op.type != "Const":
        return None
    tensor = op.attr["value"].t
    name = dtype_of(tensor.desc)
    size = struct.calcsize(_CODES.get(name, "0s"))
    if not size or len(tensor.data) > _SHOWN_NUMBERS * size:
        return None
    numbers = struct.unpack(f"<{len(tensor.data) // size}{_CODES[name]}", tensor.data)
    return f"{list(numbers) if tensor.desc.shape.dim else numbers[0]}:{name}"


def meta_of(desc: Any) -> str:
    """Return a tensor description's attribute ``_meta``: torchair's text of dtype and sizes, "" if it is missing."""
    return desc.attr["_meta"].s.decode() if "_meta" in desc.attr else ""


def dtype_of(desc: Any) -> str:
    names = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number
    return names[desc.dtype].name.removeprefix("DT_")
