"""What a graph's message has against the vendor's declarations of its ops.

A result whose dtype torchair leaves for GE to infer (DT_UNDEFINED) is not compared, nor a dtype of a group that the
documents do not spell out. Sizes and values are not looked at.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.vendor.ascend.graph.reg_ops.documents import Attribute, Declared, Operand

BORDERS = ("Data", "Const", "NetOutput")
"""What a graph begins and ends with: torchair writes these itself, and declares none of them."""
LAYOUTS = ("input_layout_info", "output_layout_info")
"""Attributes that torchair gives to ops of formats, besides those that begin with an underscore."""
_KINDS = {"Int": "i", "int": "i", "Float": "f", "Bool": "b", "String": "s", "Type": "dt"}
_LISTS = {"ListInt": "i", "ListFloat": "f", "ListBool": "b", "ListString": "s", "ListType": "dt"}


def faults(graph: Any, ops: Mapping[str, Declared]) -> list[str]:
    """One sentence for each fault of a graph (``ge_ir_pb2.GraphDef``), in the order of its ops."""
    known: dict[str, str] = {}
    found: list[str] = []
    for op in graph.op:
        if op.type not in ops and op.type not in BORDERS:
            found.append(f"{op.name}: the vendor has no op {op.type}")
        else:
            found += [f"{op.name}: {one}" for one in _of_op(op, ops.get(op.type), known)]
        for index, desc in enumerate(op.output_desc):
            known[f"{op.name}:{index}"] = dtype_name(desc)
    return found


def dtype_name(desc: Any) -> str:
    """``FLOAT16`` of a tensor's description; empty where its dtype is left to GE."""
    names = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number
    name = names[desc.dtype].name.removeprefix("DT_")
    return "" if name == "UNDEFINED" else name


def _of_op(op: Any, declared: Declared | None, known: Mapping[str, str]) -> Iterator[str]:
    given = [one for one in op.input if not one.endswith(":-1")]  # the others say only what runs before
    for source in filter(None, given):
        if source not in known:
            yield f"its input {source} is no result of an op before it"
    if declared is None or op.type in BORDERS:
        return
    if len(given) != len(op.input_desc):
        yield f"{len(given)} inputs with {len(op.input_desc)} descriptions"
        return
    pairs = [(desc.name, source) for desc, source in zip(op.input_desc, given, strict=True)]
    shared: dict[str, set[str]] = {}
    yield from _inputs(declared.inputs, pairs, known, shared)
    yield from _outputs(declared.outputs, op.output_desc, shared)
    for name, dtypes in shared.items():
        if len(dtypes) > 1:
            yield f"operands of type {name} are {' and '.join(sorted(dtypes))}, which must be one"
    yield from _attributes(declared.attributes, op.attr)


def _inputs(
    operands: Iterable[Operand],
    pairs: list[tuple[str, str]],
    known: Mapping[str, str],
    shared: dict[str, set[str]],
) -> Iterator[str]:
    """Names in the vendor's order, what must be there, and dtypes."""
    rest = list(pairs)
    for operand in operands:
        taken = _taken(operand, rest)
        del rest[: len(taken)]
        present = [(name, source) for name, source in taken if source]
        if operand.kind == "required" and not present:
            yield f"input {operand.name} is missing, or not in its place"
        for name, source in present:
            yield from _dtype(f"input {name}", operand, known.get(source, ""), shared)
    for name, _ in rest:
        yield f"input {name} is not one of its inputs, or not in its place"


def _taken(operand: Operand, rest: list[tuple[str, str]]) -> list[tuple[str, str]]:
    if operand.kind != "dynamic":
        return rest[:1] if rest and rest[0][0] == operand.name else []
    count = 0
    while count < len(rest) and rest[count][0] == f"{operand.name}{count}":
        count += 1
    return rest[:count]


def _outputs(operands: list[Operand], descs: Any, shared: dict[str, set[str]]) -> Iterator[str]:
    dynamic = any(one.kind == "dynamic" for one in operands)
    if not dynamic and len(descs) != len(operands):
        yield f"{len(descs)} results, and the vendor's op has {len(operands)}"
    by_name = {one.name: one for one in operands}
    for index, desc in enumerate(descs):
        operand = by_name.get(desc.name) or (by_name.get(re.sub(r"\d+$", "", desc.name)) if dynamic else None)
        if operand is None or (not dynamic and operands.index(operand) != index):
            yield f"result {desc.name} is not one of its results, or not in its place"
        else:
            yield from _dtype(f"result {desc.name}", operand, dtype_name(desc), shared)


def _dtype(what: str, operand: Operand, dtype: str, shared: dict[str, set[str]]) -> Iterator[str]:
    if not dtype:
        return
    if operand.dtypes is not None and dtype not in operand.dtypes:
        yield f"{what} is {dtype}, and {', '.join(sorted(operand.dtypes))} are admitted"
    if operand.same is not None:
        shared.setdefault(operand.same, set()).add(dtype)


def _attributes(declared: Mapping[str, Attribute], given: Mapping[str, Any]) -> Iterator[str]:
    for name, attribute in declared.items():
        if attribute.required and name not in given:
            yield f"attribute {name} is missing"
    for name in sorted(given):
        if name.startswith("_") or name in LAYOUTS:
            continue
        if name not in declared:
            yield f"attribute {name} is not one of its attributes"
        elif not _fits(declared[name].kind, given[name]):
            yield f"attribute {name} is no {declared[name].kind}"


def _fits(kind: str, value: Any) -> bool:
    held = value.WhichOneof("value")
    if kind in _KINDS:
        return held == _KINDS[kind]
    if kind in _LISTS:
        parts = [part for part in ("s", "i", "f", "b", "dt") if len(getattr(value.list, part))]
        return held == "list" and parts in ([], [_LISTS[kind]])
    return True  # tensors and lists of lists
