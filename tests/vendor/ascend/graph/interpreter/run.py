"""Running a graph: values by name, in the order of its ops."""

import importlib
import math
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.vendor.ascend.graph.interpreter.registry import OPS, GraphError
from tests.vendor.ascend.graph.interpreter.values import attribute_of, dtype_of

for _module in ("arithmetic", "expert_ops", "sizes", "vendor_ops"):  # they fill OPS
    importlib.import_module(f"{__package__}.{_module}")


class Graph:
    """One graph. ``run`` takes its inputs in the order of their indices and gives what NetOutput reads."""

    def __init__(self, message: Any) -> None:
        self._ops = list(message.op)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Inputs that an op writes, such as caches, are written."""
        values: dict[str, Any] = {}
        for op in self._ops:
            if op.type == "NetOutput":
                return [values[name] for name in _data_inputs(op)]
            results = [inputs[op.attr["index"].i]] if op.type == "Data" else _call(op, values)
            _check(op, results)
            for index, value in enumerate(results):
                values[f"{op.name}:{index}"] = value
        raise GraphError("a graph without NetOutput")


def _data_inputs(op: Any) -> list[str]:
    return [name for name in op.input if not name.endswith(":-1")]


def _call(op: Any, values: dict[str, Any]) -> list[Any]:
    kind = OPS.get(op.type)
    if kind is None:
        raise GraphError(f"{op.type}: the interpreter does not know this op")
    given: dict[str, Any] = {}
    for name, desc in zip(_data_inputs(op), op.input_desc, strict=True):
        if not name:
            continue
        whole = desc.name.rstrip("0123456789")
        if whole in kind.lists:
            given.setdefault(whole, []).append(values[name])
        else:
            given[desc.name] = values[name]
    attributes = {
        key: attribute_of(value)
        for key, value in op.attr.items()
        if not key.startswith("_") and key not in _LAYOUTS
    }
    try:
        results = kind.call(given, attributes)
    except Exception as error:
        raise GraphError(f"{op.type}: {error}") from error
    return list(results) if isinstance(results, (tuple, list)) else [results]


_LAYOUTS = ("input_layout_info", "output_layout_info")  # torchair's own, which it has applied by now


def _check(op: Any, results: Sequence[Any]) -> None:
    """Compare results with what torchair noted of them: ``_meta``, as text."""
    if len(results) != len(op.output_desc):
        raise GraphError(f"{op.type}: {len(op.output_desc)} results are declared, {len(results)} are there")
    for value, desc in zip(results, op.output_desc, strict=True):
        note = desc.attr["_meta"].s.decode() if "_meta" in desc.attr else ""
        told = re.fullmatch(r"Tensor\(dtype=(torch\.\w+), shape=torch\.Size\((\[.*\])\)", note)
        if told is None or value is None:
            continue
        if str(value.dtype) != told.group(1) or value.dtype != dtype_of(desc):
            raise GraphError(f"{op.type}: {desc.name} is {value.dtype}, and declared {note}, {desc.dtype}")
        wanted = [one.strip() for one in told.group(2).strip("[]").split(",") if one.strip()]
        fits = len(wanted) == value.dim() and all(
            not size.isdigit() or int(size) == actual
            for size, actual in zip(wanted, value.shape, strict=True)
        )
        fits = fits or _is_of_a_view(wanted, value)
        if not fits:
            raise GraphError(f"{op.type}: {desc.name} is {tuple(value.shape)}, and declared {note}")


def _is_of_a_view(sizes: Sequence[str], value: Tensor) -> bool:
    """Whether a note may be of a view that torchair made of a result, which it notes on the result itself."""
    numbers = [int(size) for size in sizes if size.isdigit()]
    known = math.prod(numbers)
    return (
        value.numel() == known if len(numbers) == len(sizes) else bool(known) and value.numel() % known == 0
    )
