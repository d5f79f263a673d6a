"""LMDeploy's BuildSpecs: which there are, with which fields, who builds them, and which models need them."""

import ast
import re
from dataclasses import dataclass

from dlinfer.framework.lmdeploy_ext.contract.reach import BACKENDS
from dlinfer.framework.lmdeploy_ext.contract.signatures import fields_of
from dlinfer.framework.lmdeploy_ext.contract.source import Module, Tree, dotted

_BASE = "BuildSpec"
_MODELS = "lmdeploy.pytorch.models"
_LAYERS = "lmdeploy.pytorch.nn"
_ROW = re.compile(r"['\"](\w+)['\"]\s*:\s*f?['\"](?:\{\w+\}|[\w.]+?)\.(\w+)\.(\w+)['\"]")


@dataclass(frozen=True)
class Spec:
    """One BuildSpec. fields: ``name``, or ``name=`` where it has a default."""

    name: str
    module: Module
    line: int
    fields: tuple[str, ...]


def all_specs(tree: Tree) -> dict[str, Spec]:
    """Every BuildSpec of the source by name."""
    found = {}
    for module in tree.holding(_BASE, below=BACKENDS):
        for name, node in module.names.items():
            if isinstance(node, ast.ClassDef) and name != _BASE and _is_spec(node):
                fields = tuple(field + "=" * default for field, default in fields_of(node))
                found[name] = Spec(name, module, node.lineno, fields)
    return found


def _is_spec(node: ast.ClassDef) -> bool:
    bases = (one.value if isinstance(one, ast.Subscript) else one for one in node.bases)
    return any(dotted(base).rpartition(".")[2].endswith(_BASE) for base in bases)


def architectures_of(tree: Tree) -> dict[str, str]:
    """Architecture -> the module of LMDeploy that holds its class, by ``module_map.py``."""
    rows = _ROW.findall(tree.text(f"{_MODELS}.module_map"))
    return {arch: f"{_MODELS}.{file}" for arch, file, _ in rows}


def models_of(tree: Tree, spec: str) -> list[str]:
    """Architectures whose model's file names a layer that asks for a spec, directly or through other layers."""
    names, grew = {spec}, True
    layers = list(tree.holding("class ", "def ", below=_LAYERS))
    while grew:
        grew = False
        for module in layers:
            if not any(name in tree.text(module.name) for name in names):
                continue
            for name, node in module.names.items():
                if (
                    name not in names
                    and isinstance(node, ast.ClassDef | ast.FunctionDef)
                    and _names(node) & names
                ):
                    names.add(name)
                    grew = True
    using = {module.name for module in tree.holding(*names, below=_MODELS) if _imported(module) & names}
    return sorted(arch for arch, file in architectures_of(tree).items() if file in using)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _imported(module: Module) -> set[str]:
    return {inner for _, _, inner, _ in module.imported(module.tree)}
