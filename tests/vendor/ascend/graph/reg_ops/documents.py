"""REG_OP, the vendor's declaration of each op of GE, read from the docstrings of torchair's functions.

They are read as text: the package need not load. ``.INPUT(x, TensorType({DT_FLOAT16, DT_BF16}))`` is one line of it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = tuple(
    f"torch_npu/dynamo/torchair/{path}"
    for path in ("_ge_concrete_graph/auto_generated_ge_raw_ops.py", "ge/_ge_graph.py")
)
"""Within the folder that torch_npu is installed in; the second has what torchair writes by hand, such as Cast."""

_OP = re.compile(r'REG_OP\((\w+)\)(.*?)"""', re.DOTALL)
_LINE = re.compile(
    r"^\s*\.(INPUT|OPTIONAL_INPUT|DYNAMIC_INPUT|OUTPUT|DYNAMIC_OUTPUT|ATTR|REQUIRED_ATTR|DATATYPE)"
    r"\((\w+),\s*(.*)\)(?:\\n)?\s*$",
    re.MULTILINE,
)
_CONTINUED = re.compile(r",\s*\n\s*")
"""A list of dtypes that goes on in the next line."""
_SPELT = {"FLOAT32": "FLOAT"}
"""Names that the documents use for a dtype beside the one of the message."""
_GROUPS = {"IndexNumberType": ("INT32", "INT64")}
"""Named groups of dtypes that are known; what the others hold stands in CANN, which is not here."""


@dataclass(frozen=True)
class Operand:
    """An input or an output.

    kind: required, optional or dynamic (a list of tensors). dtypes: admitted, without ``DT_``; None where the documents
    name a group whose members they do not tell. same: the name that operands of one dtype share, such as ``T``.
    """

    name: str
    kind: str
    dtypes: frozenset[str] | None
    same: str | None = None


@dataclass(frozen=True)
class Attribute:
    """kind: Int, Float, Bool, String, ListInt, Type, ... as the documents write it."""

    name: str
    kind: str
    required: bool


@dataclass
class Declared:
    """One op type. Inputs and outputs are in the vendor's order."""

    inputs: list[Operand] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    attributes: dict[str, Attribute] = field(default_factory=dict)


def read(text: str) -> dict[str, Declared]:
    """Every op of a source of torchair, by its type; of an op that is declared twice the first."""
    ops: dict[str, Declared] = {}
    for name, body in _OP.findall(text):
        if name not in ops:
            ops[name] = _declared(_LINE.findall(_CONTINUED.sub(", ", body)))
    return ops


def read_package(site: Path) -> dict[str, Declared]:
    """Every op of the torch_npu that is installed in a folder."""
    return read("".join((site / source).read_text() for source in SOURCES))


def _declared(lines: Iterable[tuple[str, str, str]]) -> Declared:
    lines = list(lines)
    shared = {name: _dtypes(told) for what, name, told in lines if what == "DATATYPE"}
    found = Declared()
    for what, name, told in lines:
        if what.endswith("ATTR"):
            kind = told.split(",")[0].strip()
            found.attributes[name] = Attribute(name, kind, required=what == "REQUIRED_ATTR")
        elif what.endswith("INPUT"):
            found.inputs.append(_operand(what, name, told, shared))
        elif what.endswith("OUTPUT"):
            found.outputs.append(_operand(what, name, told, shared))
    return found


def _operand(what: str, name: str, told: str, shared: Mapping[str, frozenset[str] | None]) -> Operand:
    prefix = what.rpartition("_")[0]
    kind = {"": "required", "OPTIONAL": "optional", "DYNAMIC": "dynamic"}[prefix]
    if not told.startswith("TensorType"):
        same = told.strip('" ')
        return Operand(name, kind, shared.get(same), same)
    return Operand(name, kind, _dtypes(told))


def _dtypes(told: str) -> frozenset[str] | None:
    """``TensorType({DT_FLOAT16, DT_BF16})`` or ``TensorType::IndexNumberType()`` as a set; None for an untold group."""
    members: set[str] = set()
    for name in re.findall(r"\w+", told):
        if name == "TensorType":
            continue
        if name.startswith("DT_"):
            plain: str = name.removeprefix("DT_")
            members.add(_SPELT.get(plain, plain))
        elif name in _GROUPS:
            members.update(_GROUPS[name])
        else:
            return None
    return frozenset(members) or None
