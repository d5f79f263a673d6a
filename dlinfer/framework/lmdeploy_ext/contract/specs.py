"""Compares LMDeploy's BuildSpecs with the record, and their fields with the fields that our layers read."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dlinfer.framework.lmdeploy_ext.checks.model.support import NOT_SERVED
from dlinfer.framework.lmdeploy_ext.contract.drift import Drift, Severity
from dlinfer.framework.lmdeploy_ext.contract.ours import Adaptor
from dlinfer.framework.lmdeploy_ext.contract.reach import BACKENDS, Reach
from dlinfer.framework.lmdeploy_ext.contract.records import Record
from dlinfer.framework.lmdeploy_ext.contract.signatures import fields_of
from dlinfer.framework.lmdeploy_ext.contract.source import Tree, base_names

_BASE = "BuildSpec"
_MODELS = "lmdeploy.pytorch.models"
_LAYERS = "lmdeploy.pytorch.nn"
_ROW = re.compile(r"['\"](\w+)['\"]\s*:\s*f?['\"](?:\{\w+\}|[\w.]+?)\.(\w+)\.(\w+)['\"]")
_NEW_FIELD = (
    "read what it means; pass it on, or refuse all values but the neutral one; then record the release"
)
_UNBUILT = "write a layer for it (running/backend.py), or leave it: a model that needs it is refused while it is built"


@dataclass(frozen=True)
class Spec:
    """One BuildSpec class. where: ``file:line``. fields: each is ``name``, or ``name=`` if it has a default."""

    name: str
    where: str
    fields: tuple[str, ...]


def all_specs(tree: Tree) -> dict[str, Spec]:
    """Return every BuildSpec class in LMDeploy's source, by name."""
    return {
        name: Spec(name, tree.where(module, node), tuple(field + "=" * has for field, has in fields_of(node)))
        for module in tree.holding(_BASE, below=BACKENDS)
        for name, node in module.names.items()
        if isinstance(node, ast.ClassDef) and name != _BASE
        if any(base.endswith(_BASE) for base in base_names(node))
    }


def models_of(tree: Tree, spec: str) -> list[str]:
    """Return the served architectures that have a layer with this BuildSpec, directly or inside other layers."""
    names, grew = {spec}, True
    layers = list(tree.holding("class ", "def ", below=_LAYERS))
    while grew:
        users = {
            name
            for module in layers
            if any(word in tree.text(module.name) for word in names)
            for name, node in module.names.items()
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            if any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))
        }
        grew = not users <= names
        names |= users
    files = {
        module.name
        for module in tree.holding(*names, below=_MODELS)
        if any(full.rpartition(".")[2] in names for _, full, _ in module.imported(module.tree))
    }
    rows = _ROW.findall(tree.text(f"{_MODELS}.module_map"))
    return sorted({arch for arch, file, _ in rows if f"{_MODELS}.{file}" in files and arch not in NOT_SERVED})


def compare(
    tree: Tree, adaptor: Adaptor, reach: Reach, record: Record, specs: dict[str, Spec]
) -> Iterator[Drift]:
    """Yield a drift for each BuildSpec or field that was added or removed since the reviewed release ``record``.

    A field that our layers read, but that LMDeploy's source lacks, gives a drift too. specs: the result of
    ``all_specs``.
    """
    if not specs:
        step = "write another backend: this release chooses its layers in another way"
        used = f"no BuildSpec; {record.version} has {len(record.specs)}"
        offered, where = "running/backend.py builds specs", f"{BACKENDS}.base"
        yield Drift("removed BuildSpec", "essential", where, used, offered, step)
        return
    for name, spec in specs.items():
        if name not in record.specs:
            yield _new_spec(tree, reach, spec)
            continue
        severity, before = _severity(adaptor, name), record.specs[name]
        built = ", ".join(reach.builders.get(name, [])) or "no layer builds it"
        built = "our backend builds it" if name in adaptor.own_specs else built
        for field in spec.fields:
            if field not in before:
                used, offered = f"{name}.{field}", f"not in {record.version}; {built}"
                yield Drift("new field", severity, spec.where, used, offered, _NEW_FIELD)
        for field in before:
            if field not in spec.fields:
                used, offered = f"{name}({', '.join(spec.fields)})", f"{field} in {record.version}; {built}"
                yield Drift(
                    "removed field",
                    severity,
                    spec.where,
                    used,
                    offered,
                    "stop reading it, or read what replaces it",
                )
    for name in [name for name in adaptor.own_specs if name in specs]:
        fields = sorted({field.rstrip("=") for field in specs[name].fields})
        for field, where in adaptor.fields_read(name):
            if field not in fields:
                used, offered = f"{name}.{field}, which we read", f"fields {', '.join(fields)}"
                step = "read the field that replaces it"
                yield Drift("removed field", "essential", where, used, offered, step)
    for name in [name for name in record.specs if name not in specs]:
        severity, where = _severity(adaptor, name), f"{tree.package} {tree.version}"
        instead = "find out what LMDeploy's layers build instead"
        step = instead if severity == "essential" else "record the release"
        yield Drift("removed BuildSpec", severity, where, "nothing", f"{name} in {record.version}", step)


def _severity(adaptor: Adaptor, spec: str) -> Severity:
    return "essential" if spec in adaptor.own_specs else "optional"


def _new_spec(tree: Tree, reach: Reach, spec: Spec) -> Drift:
    models = models_of(tree, spec.name)
    users = f"; reached by {', '.join(models[:4])}{', ...' * (len(models) > 4)}" if models else ""
    used = f"{spec.name}({', '.join(spec.fields)}){users}"
    if builders := reach.builders.get(spec.name):
        step = f"check that LMDeploy's {builders[0]} builds it from what we provide, then record the release"
        return Drift("new BuildSpec", "optional", spec.where, used, f"{builders[0]} builds it", step)
    severity = "essential" if models else "optional"
    return Drift("new BuildSpec", severity, spec.where, used, "no layer on this device builds it", _UNBUILT)
