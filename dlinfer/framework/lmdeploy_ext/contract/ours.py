"""What this adaptor takes of LMDeploy, read from its own source: names, base classes, BuildSpecs and their fields."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import dlinfer
from dlinfer.framework.lmdeploy_ext.contract.source import (
    Found,
    Function,
    Module,
    Tree,
    dotted,
    within,
)
from dlinfer.framework.patching import Patch

ROOT = "dlinfer.framework.lmdeploy_ext"
BACKEND = f"{ROOT}.running.backend"
SPEC = "BuildSpec"


@dataclass(frozen=True)
class Taken:
    """A name of LMDeploy's that a file of ours imports. name: empty where the module itself is imported."""

    module: str
    name: str
    local: str
    where: str
    by: Module


@dataclass(frozen=True)
class Extended:
    """A class of ours whose base is LMDeploy's. base: ``module:Class``."""

    ours: ast.ClassDef
    module: Module
    base: tuple[str, str]
    where: str

    @property
    def methods(self) -> dict[str, Function]:
        """Its functions by name."""
        return {one.name: one for one in self.ours.body if isinstance(one, Function)}


class Adaptor:
    """Our own source, and the patches that it holds."""

    def __init__(self, patches: tuple[Patch, ...], package: str = "lmdeploy") -> None:
        self.patches, self.package = patches, package
        self.tree = Tree(Path(dlinfer.__file__).parents[1], "dlinfer")
        self.modules = [
            module
            for module in self.tree.holding(package, below=ROOT)
            if not within(module.name, f"{ROOT}.contract") and not within(module.name, f"{ROOT}.selfcheck")
        ]

    def severity(self, module: Module) -> str:
        """essential, unless every patch that a file of ours holds can be done without, or it only looks ahead."""
        if within(module.name, f"{ROOT}.preflight"):
            return "optional"
        held = [patch.essential for patch in self.patches if patch.home == module.name]
        return "optional" if held and not any(held) else "essential"

    def where(self, module: Module, line: int) -> str:
        """``dlinfer/file.py:line``."""
        return self.tree.where(module, line)

    @cached_property
    def takes(self) -> list[Taken]:
        """Every import from LMDeploy."""
        return [
            Taken(target, inner, local, self.where(module, line), module)
            for module in self.modules
            for local, target, inner, line in module.imported(module.tree)
            if within(target, self.package)
        ]

    @cached_property
    def extends(self) -> list[Extended]:
        """Every class upon one of LMDeploy's."""
        found = []
        for module in self.modules:
            taken = {one.local: (one.module, one.name) for one in self.takes if one.by is module}
            for node in module.names.values():
                for base in node.bases if isinstance(node, ast.ClassDef) else ():
                    name = dotted(base.value if isinstance(base, ast.Subscript) else base)
                    if name in taken:
                        assert isinstance(node, ast.ClassDef)
                        found.append(Extended(node, module, taken[name], self.where(module, node.lineno)))
        return found

    @cached_property
    def own_specs(self) -> dict[str, tuple[Module, ast.AST]]:
        """BuildSpec that our backend builds itself -> what builds it. The table leaves that word out."""
        table = self._table("_OURS")
        return {
            f"{key.value}{SPEC}": self._builder(value)
            for key, value in zip(table.keys, table.values, strict=True)
            if isinstance(key, ast.Constant)
        }

    def fields_read(self, spec: str) -> Iterator[tuple[str, str]]:
        """(field, where) of everything that we read of a BuildSpec that we build."""
        module, node = self.own_specs[spec]
        for one in ast.walk(node):
            if isinstance(one, ast.Attribute) and dotted(one.value).rpartition(".")[2] == "spec":
                yield one.attr, self.where(module, one.lineno)

    def calls(self) -> Iterator[tuple[Taken, ast.Call]]:
        """Every call of a name that is taken from LMDeploy."""
        for module in self.modules:
            taken = {one.local: one for one in self.takes if one.by is module and one.name}
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call) and dotted(node.func) in taken:
                    yield taken[dotted(node.func)], node

    def _table(self, name: str) -> ast.Dict:
        module = self.tree.module(BACKEND)
        node = module.names.get(name) if module is not None else None
        table = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        assert isinstance(table, ast.Dict), f"{BACKEND} has a table {name}"
        return table

    def _builder(self, value: ast.expr) -> tuple[Module, ast.AST]:
        """What an expression of the table leads to: a class, or the module of a function that others help."""
        module = self.tree.module(BACKEND)
        assert module is not None, "it was found for the table"
        first, *rest = dotted(value).split(".")
        function = module.names.get(first)
        if isinstance(function, Function):  # which imports what it calls
            names = [f"{target}.{inner}" for _, target, inner, _ in module.imported(function)]
            home = next((found for found in map(self.tree.module, names) if found is not None), module)
            return home, home.tree
        target = ".".join(part for part in module.imports.get(first, ("", "")) if part)
        home = self.tree.module(target)
        if home is None or not rest:
            return module, value
        node = home.names.get(rest[0])
        return home, node if isinstance(node, ast.ClassDef) else home.tree


def base_of(tree: Tree, extended: Extended) -> Found | None:
    """LMDeploy's class under one of ours."""
    return tree.find(*extended.base)
