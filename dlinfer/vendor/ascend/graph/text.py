"""A graph of GE as text that is the same for the same graph: for reports and golden files.

A line is an op: ``%4 = RmsNorm(x=%0, gamma=%1, epsilon=1e-05) -> y: FLOAT16[n0, 64], rstd: FLOAT[n0, 1]``. ``%4:1`` is
its second result; ``n0`` is the first size that changes between calls. What torchair notes for itself, the attributes
that begin with an underscore, is left out.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Any

_SHOWN_NUMBERS = 8
"""Constants of up to so many numbers are written out."""
_SYMBOL = re.compile(r"\b[suz]\d+\b")


def text_of(graph: Any) -> str:
    """A graph as torchair has it (``GeGraph``), in the order of its ops."""
    return "\n".join(_Writer().lines(graph))


class _Writer:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.symbols: dict[str, str] = {}

    def lines(self, graph: Any) -> Iterator[str]:
        for number, op in enumerate(graph.op):
            self.numbers[op.name] = number
        for number, op in enumerate(graph.op):
            given = [*self._inputs(op), *self._attributes(op)]
            results = ", ".join(self._result(desc) for desc in op.output_desc)
            yield f"%{number} = {op.type}({', '.join(given)})" + (f" -> {results}" if results else "")

    def _inputs(self, op: Any) -> Iterator[str]:
        data = [one for one in op.input if not one.endswith(":-1")]
        for value, desc in zip(data, op.input_desc, strict=op.type != "Data"):
            if value:
                yield f"{desc.name}={self._reference(value)}"
        for value in op.input:
            if value.endswith(":-1"):
                yield f"after {self._reference(value.removesuffix(':-1') + ':0')}"

    def _reference(self, value: str) -> str:
        name, _, index = value.rpartition(":")
        return f"%{self.numbers[name]}" + ("" if index == "0" else f":{index}")

    def _attributes(self, op: Any) -> Iterator[str]:
        for key in sorted(op.attr):
            if not key.startswith("_"):
                yield f"{key}={self._value(op.attr[key])}"

    def _value(self, attribute: Any) -> str:
        kind = attribute.WhichOneof("value")
        value = getattr(attribute, kind) if kind else None
        if kind == "s":
            return repr(value.decode())
        if kind == "f":
            return f"{value:.7g}"
        if kind == "list":
            return str([*value.s, *value.i, *value.f, *value.b, *value.dt])
        if kind == "t":
            return self._constant(value)
        if kind == "dt":
            names = attribute.DESCRIPTOR.fields_by_name["dt"].enum_type.values_by_number
            return names[value].name.removeprefix("DT_")
        return str(value).strip() if kind not in (None, "func", "g", "td") else f"<{kind}>"

    def _constant(self, tensor: Any) -> str:
        name, sizes = dtype_of(tensor.desc), list(tensor.desc.shape.dim)
        values = numbers_of(tensor)
        if values is None or len(values) > _SHOWN_NUMBERS:
            return f"{name}{sizes} crc32 {zlib.crc32(tensor.data):08x}"
        return str(values if sizes else values[0])

    def _result(self, desc: Any) -> str:
        name = f"{desc.name}: " if desc.name else ""
        return f"{name}{dtype_of(desc)}{self._sizes(desc)}"

    def _sizes(self, desc: Any) -> str:
        told = re.search(r"shape=torch\.Size\((\[.*\])\)", meta_of(desc))
        if told is None:
            return str(list(desc.shape.dim)) if not meta_of(desc) and desc.shape.dim else "[?]"
        return _SYMBOL.sub(lambda found: self._symbol(found.group()), told.group(1))

    def _symbol(self, name: str) -> str:
        return self.symbols.setdefault(name, f"n{len(self.symbols)}")


def meta_of(desc: Any) -> str:
    """What torchair noted of the tensor that a description is of, as text; empty where nothing."""
    return desc.attr["_meta"].s.decode() if "_meta" in desc.attr else ""


def dtype_of(desc: Any) -> str:
    """``FLOAT16`` of a description's ``DT_FLOAT16``."""
    names = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number
    return names[desc.dtype].name.removeprefix("DT_")


_FORMATS = {"FLOAT": "f", "DOUBLE": "d", "INT32": "i", "INT64": "q", "BOOL": "?", "INT8": "b", "UINT8": "B"}


def numbers_of(tensor: Any) -> list[Any] | None:
    """The numbers of a constant, flat; None for a dtype that Python has no numbers of."""
    code = _FORMATS.get(dtype_of(tensor.desc))
    return memoryview(tensor.data).cast(code).tolist() if code is not None else None
