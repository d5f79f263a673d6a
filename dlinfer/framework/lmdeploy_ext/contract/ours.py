"""Finds the names, base classes, BuildSpecs and BuildSpec fields of LMDeploy that our adaptor's source uses."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import dlinfer
from dlinfer.framework.lmdeploy_ext.contract.drift import Severity
from dlinfer.framework.lmdeploy_ext.contract.source import (
    Function,
    Module,
    Tree,
    base_names,
    dotted,
    functions,
    within,
)
from dlinfer.framework.patching import Patch

ROOT = "dlinfer.framework.lmdeploy_ext"
BACKEND = f"{ROOT}.running.backend"


@dataclass(frozen=True)
class Taken:
    """A name that our adaptor imports from LMDeploy. name: the full name. where: ``file:line``. by: our module."""

    name: str
    where: str
    by: Module


@dataclass(frozen=True)
class Extended:
    """A class of ours that extends a class of LMDeploy's. ours: our class. base: the full name of LMDeploy's class."""

    ours: ast.ClassDef
    base: str
    where: str

    @property
    def methods(self) -> dict[str, Function]:
        """A dict from name to method, for the methods that our class itself defines."""
        return {function.name: function for function in functions(self.ours)}


class Adaptor:
    """The parsed source of our adaptor, and its patches. package: the framework's package, ``lmdeploy``."""

    def __init__(self, patches: tuple[Patch, ...], package: str = "lmdeploy") -> None:
        self.patches, self.package = patches, package
        self.tree = Tree(Path(dlinfer.__file__).parents[1], "dlinfer")
        apart = (f"{ROOT}.contract", f"{ROOT}.selfcheck")
        self.modules = [
            module
            for module in self.tree.holding(package, below=ROOT)
            if not any(within(module.name, name) for name in apart)
        ]

    def severity(self, module: Module) -> Severity:
        """Return the severity of differences from LMDeploy in ``module``, a file of ours.

        It is ``optional`` in preflight, and in a file that has patches but no essential ones. Else it is ``essential``.
        """
        if within(module.name, f"{ROOT}.preflight"):
            return "optional"
        essential = [patch.essential for patch in self.patches if patch.home == module.name]
        return "optional" if essential and not any(essential) else "essential"

    @cached_property
    def takes(self) -> list[Taken]:
        """All imports from LMDeploy in our adaptor."""
        return [taken for module in self.modules for _, taken in self._taken(module)]

    def _taken(self, module: Module) -> Iterator[tuple[str, Taken]]:
        """Yield (local name, import) for each import from LMDeploy in ``module``, a file of ours."""
        for local, name, line in module.imported(module.tree):
            if within(name, self.package):
                yield local, Taken(name, self.tree.where(module, line), module)

    @cached_property
    def extends(self) -> list[Extended]:
        """All classes of ours that extend a class of LMDeploy's."""
        return [
            Extended(node, taken[name].name, self.tree.where(module, node))
            for module in self.modules
            for taken in [dict(self._taken(module))]
            for node in module.names.values()
            if isinstance(node, ast.ClassDef)
            for name in base_names(node)
            if name in taken
        ]

    @cached_property
    def own_specs(self) -> dict[str, tuple[Module, ast.AST]]:
        """A dict from BuildSpec name to (our module, syntax tree of its builder).

        It has each BuildSpec that our backend builds itself.
        """
        module = self.tree.module(BACKEND)
        table = getattr(module.names.get("_OURS"), "value", None) if module is not None else None
        assert module is not None and isinstance(table, ast.Dict), f"{BACKEND} has a table _OURS"
        return {
            f"{key.value}BuildSpec": self._builder(module, value)
            for key, value in zip(table.keys, table.values, strict=True)
            if isinstance(key, ast.Constant)
        }

    def _builder(self, backend: Module, value: ast.expr) -> tuple[Module, ast.AST]:
        """Return (our module, syntax tree) of the code that builds a BuildSpec.

        backend: our backend's module. value: the BuildSpec's value in its table ``_OURS``. If the value names a
        function of another module, the syntax tree is that of the whole other module.
        """
        first, *rest = dotted(value).split(".")
        home = self.tree.module(backend.imports.get(first, ""))
        if home is None or not rest:
            return backend, value
        node = home.names.get(rest[0])
        return home, node if isinstance(node, ast.ClassDef) else home.tree

    def fields_read(self, spec: str) -> Iterator[tuple[str, str]]:
        """Yield (field, ``file:line``) for each field that our code reads from the BuildSpec named ``spec``."""
        module, builder = self.own_specs[spec]
        for node in ast.walk(builder):
            if isinstance(node, ast.Attribute) and dotted(node.value).rpartition(".")[2] == "spec":
                yield node.attr, self.tree.where(module, node)

    def calls(self) -> Iterator[tuple[Taken, ast.Call]]:
        """Yield (import, call) for each call in our adaptor of a name that it imports from LMDeploy."""
        for module in self.modules:
            taken = dict(self._taken(module))
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call) and dotted(node.func) in taken:
                    yield taken[dotted(node.func)], node
