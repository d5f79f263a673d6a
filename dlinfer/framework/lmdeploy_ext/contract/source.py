"""LMDeploy's source as a tree of parsed modules, in which names are looked up as Python would, and nothing is run."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from dlinfer.errors import FrameworkSourceError

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Module:
    """One file. names: its own definitions. imports: local name -> (module, name in it, or empty for the module)."""

    name: str
    path: Path
    tree: ast.Module
    names: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def is_package(self) -> bool:
        """Whether it is a package's ``__init__``."""
        return self.path.name == "__init__.py"

    def imported(self, node: ast.AST) -> Iterator[tuple[str, str, str, int]]:
        """(local name, module, name in it or empty, line) of the imports inside a node, at any depth."""
        for one in ast.walk(node):
            if isinstance(one, ast.Import):
                for alias in one.names:
                    local = alias.asname or alias.name.partition(".")[0]
                    yield local, alias.name if alias.asname else local, "", one.lineno
                    if not alias.asname and "." in alias.name:
                        yield local, alias.name, "", one.lineno
            elif isinstance(one, ast.ImportFrom):
                base = self._absolute(one)
                for alias in one.names:
                    yield alias.asname or alias.name, base, alias.name, one.lineno

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        above = package[: len(package) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Found:
    """A definition and the module that it stands in. owner: the class that a method stands in."""

    module: Module
    node: Definition
    owner: ast.ClassDef | None = None

    @property
    def name(self) -> str:
        """``package.module:Class.name``."""
        own = getattr(self.node, "name", "")
        return f"{self.module.name}:{self.owner.name}.{own}" if self.owner else f"{self.module.name}:{own}"


class Tree:
    """The source of one package below a folder."""

    def __init__(self, folder: Path, package: str = "lmdeploy") -> None:
        """folder: what holds the package, or the package itself. Raises FrameworkSourceError."""
        root = folder / package
        if not root.is_dir() and folder.name == package:
            root = folder
        if not (root / "__init__.py").is_file():
            raise FrameworkSourceError(folder=folder, detail=f"it holds no package {package!r}")
        self.package, self.root = package, root
        self.paths = {self._module_name(path): path for path in sorted(root.rglob("*.py"))}
        self._parsed: dict[str, Module | None] = {}
        self._texts: dict[str, str] = {}

    @cached_property
    def version(self) -> str:
        """What ``version.py`` says. Raises FrameworkSourceError."""
        found = re.search(
            r"^__version__\s*=\s*['\"]([^'\"]+)", self.text(f"{self.package}.version"), re.MULTILINE
        )
        if found is None:
            raise FrameworkSourceError(folder=self.root, detail="its version.py states no __version__")
        return found.group(1)

    def text(self, name: str) -> str:
        """The text of a module; empty where there is none."""
        if name not in self._texts:
            path = self.paths.get(name)
            self._texts[name] = path.read_text(encoding="utf-8") if path is not None else ""
        return self._texts[name]

    def module(self, name: str) -> Module | None:
        """A module, parsed; None where there is none. Raises FrameworkSourceError for one that does not parse."""
        if name not in self._parsed:
            self._parsed[name] = self._parse(name) if name in self.paths else None
        return self._parsed[name]

    def holding(self, *words: str, below: str = "") -> Iterator[Module]:
        """The modules below a package whose text holds one of some words."""
        for name in self.paths:
            if within(name, below or self.package) and any(word in self.text(name) for word in words):
                module = self.module(name)
                assert module is not None, "it is one of the paths"
                yield module

    def where(self, module: Module, line: int) -> str:
        """``package/file.py:line``."""
        return f"{self.package}/{module.path.relative_to(self.root)}:{line}"

    def find(self, module: str, path: str) -> Found | None:
        """What ``module:A.b`` names, through imports and base classes; None where nothing does."""
        owner = self.module(module)
        first, *rest = path.split(".")
        found = self._top(owner, first, set()) if owner is not None else None
        for part in rest:
            found = self.member(found, part) if found is not None else None
        return found

    def member(self, found: Found, name: str) -> Found | None:
        """An attribute of a class, its own or a base's."""
        return next((one for one in self.members(found) if getattr(one.node, "name", "") == name), None)

    def members(self, found: Found) -> Iterator[Found]:
        """The functions of a class and of its bases in this tree, nearest first; one name may come several times."""
        for one in self.bases(found):
            assert isinstance(one.node, ast.ClassDef)
            for node in one.node.body:
                if isinstance(node, Function):
                    yield Found(one.module, node, one.node)

    def bases(self, found: Found) -> list[Found]:
        """A class and those of its bases that stand in this tree, nearest first."""
        if not isinstance(found.node, ast.ClassDef):
            return []
        chain = [found]
        for base in found.node.bases:
            name = dotted(base.value if isinstance(base, ast.Subscript) else base)
            above = self.look(found.module, name) if name else None
            chain += [one for one in self.bases(above) if one not in chain] if above is not None else []
        return chain

    def look(self, module: Module, name: str) -> Found | None:
        """What a dotted name means at the top of a module."""
        first, *rest = name.split(".")
        if first in module.imports and rest:
            target, inner = module.imports[first]
            submodule = f"{target}.{inner}" if inner else target
            if submodule in self.paths:
                return self.find(submodule, ".".join(rest))
        return self.find(module.name, name)

    def _top(self, module: Module, name: str, seen: set[tuple[str, str]]) -> Found | None:
        if (module.name, name) in seen:
            return None
        seen.add((module.name, name))
        if name in module.names:
            return Found(module, module.names[name])
        if name in module.imports:
            target, inner = module.imports[name]
            other = self.module(target)
            return self._top(other, inner, seen) if other is not None and inner else None
        return None

    def _module_name(self, path: Path) -> str:
        parts = (self.package, *path.relative_to(self.root).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _parse(self, name: str) -> Module:
        path = self.paths[name]
        try:
            module = Module(name, path, ast.parse(self.text(name)))
        except SyntaxError as cause:
            detail = f"{path}:{cause.lineno} does not parse in this Python ({cause.msg})"
            raise FrameworkSourceError(folder=self.root, detail=detail) from cause
        for node in statements(module.tree.body):
            if isinstance(node, Definition):
                for defined in _defines(node):
                    module.names[defined] = node
            else:
                for local, target, inner, _ in module.imported(node):
                    module.imports.setdefault(local, (target, inner))
        return module


def within(name: str, package: str) -> bool:
    """Whether a module is a package or lies in it."""
    return name == package or name.startswith(f"{package}.")


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Definitions, assignments and imports of a body, those under ``if``, ``try`` and ``with`` included."""
    for node in body:
        if isinstance(node, Definition | ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _defines(node: Definition) -> list[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    return [node.name]
