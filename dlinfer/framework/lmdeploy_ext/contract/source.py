"""Parses a package's source and resolves names in it as Python's imports would, without running any code."""

import ast
import importlib.util
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
    """One parsed file. names: top-level name -> its definition. imports: local name -> full dotted name."""

    name: str
    path: Path
    tree: ast.Module
    names: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)

    def imported(self, node: ast.AST) -> Iterator[tuple[str, str, int]]:
        """Yield (local name, full name, line) of each import inside a syntax node of this module, at any depth."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for statement in ast.walk(node):
            if isinstance(statement, ast.ImportFrom):
                base = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
                for alias in statement.names:
                    yield alias.asname or alias.name, f"{base}.{alias.name}", statement.lineno
            elif isinstance(statement, ast.Import):
                for alias in statement.names:
                    local = alias.asname or alias.name.partition(".")[0]
                    for full in dict.fromkeys([alias.name if alias.asname else local, alias.name]):
                        yield local, full, statement.lineno

    def full(self, name: str) -> str:
        """Return the full name of the object that ``name`` stands for in this module.

        name: may have dots, such as ``torch.Tensor``.
        """
        first, dot, rest = name.partition(".")
        imported = first in self.imports and first not in self.names
        return (self.imports[first] if imported else f"{self.name}.{first}") + dot + rest

    def enclosing(self, line: int) -> str:
        """Return the name of the top-level definition that contains a line; an empty text if there is none."""
        inside = (name for name, node in self.names.items() if node.lineno <= line <= (node.end_lineno or 0))
        return next(inside, "")


@dataclass(frozen=True)
class Found:
    """A definition and its module. owner: the class, if the definition is a method; else None."""

    module: Module
    node: Definition
    owner: ast.ClassDef | None = None

    @property
    def name(self) -> str:
        """The full name, such as ``package.module:Class.name``."""
        return f"{self.module.name}:{self.owner.name + '.' if self.owner else ''}{name_of(self.node)}"


class Tree:
    """The source files of one package, which are parsed when they are needed."""

    def __init__(self, folder: Path, package: str = "lmdeploy") -> None:
        """List the package's files. folder: the package's folder, or its parent. Raises FrameworkSourceError."""
        root = folder / package
        if not root.is_dir() and folder.name == package:
            root = folder
        if not (root / "__init__.py").is_file():
            raise FrameworkSourceError(folder=folder, detail=f"it does not contain the package {package!r}")
        self.package, self.root = package, root
        self.paths = {self._module_name(path): path for path in sorted(root.rglob("*.py"))}
        self._parsed: dict[str, Module | None] = {}
        self._texts: dict[str, str] = {}

    @cached_property
    def version(self) -> str:
        """``__version__`` in the package's ``version.py``. Raises FrameworkSourceError if the file does not set it."""
        match = re.search(
            r"^__version__\s*=\s*['\"]([^'\"]+)", self.text(f"{self.package}.version"), re.MULTILINE
        )
        if match is None:
            raise FrameworkSourceError(folder=self.root, detail="its version.py has no __version__")
        return match[1]

    def text(self, name: str) -> str:
        """Return the source text of the module ``name``; an empty text if there is no such module."""
        if name not in self._texts:
            path = self.paths.get(name)
            self._texts[name] = path.read_text(encoding="utf-8") if path is not None else ""
        return self._texts[name]

    def module(self, name: str) -> Module | None:
        """Return the parsed module ``name``; None if there is none. Raises FrameworkSourceError for invalid syntax."""
        if name not in self._parsed:
            self._parsed[name] = self._parse(name) if name in self.paths else None
        return self._parsed[name]

    def holding(self, *words: str, below: str = "") -> Iterator[Module]:
        """Yield the modules whose source text contains any of the words.

        below: yield only modules inside this package; empty for all modules.
        """
        for name in self.paths:
            if within(name, below or self.package) and any(word in self.text(name) for word in words):
                module = self.module(name)
                assert module is not None, "it is one of the paths"
                yield module

    def where(self, module: Module, node: ast.AST | int) -> str:
        """Return ``package/file.py:line``. node: a syntax node of ``module``, or a line number."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.package}/{module.path.relative_to(self.root)}:{line}"

    def origin(self, name: str) -> str:
        """Return the full name of the definition that ``name`` leads to. Follows imports from module to module."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            module, (first, *rest) = self._split(name)
            if module is not None and first not in module.names and first in module.imports:
                name = ".".join([module.imports[first], *rest])
        return name

    def find(self, name: str) -> Found | None:
        """Return the definition with this full dotted name; None if there is none. Follows imports and base classes."""
        module, (first, *rest) = self._split(self.origin(name))
        node = module.names.get(first) if module is not None else None
        definition = Found(module, node) if module is not None and node is not None else None
        for part in rest:
            definition = self.member(definition, part) if definition is not None else None
        return definition

    def member(self, definition: Found, name: str) -> Found | None:
        """Return a class's own or inherited method ``name``; None if there is none. definition: the class."""
        return next((member for member in self.members(definition) if name_of(member.node) == name), None)

    def members(self, definition: Found) -> Iterator[Found]:
        """Yield the methods of a class, then the methods of its bases in this tree, including overridden ones."""
        for base in self.bases(definition):
            assert isinstance(base.node, ast.ClassDef)
            for function in functions(base.node):
                yield Found(base.module, function, base.node)

    def bases(self, definition: Found) -> list[Found]:
        """Return a class and its bases in this tree, nearest first; an empty list if ``definition`` is not a class."""
        if not isinstance(definition.node, ast.ClassDef):
            return []
        chain = [definition]
        for name in base_names(definition.node):
            above = self.find(definition.module.full(name)) if name else None
            chain += [base for base in self.bases(above) if base not in chain] if above is not None else []
        return chain

    def _split(self, name: str) -> tuple[Module | None, list[str]]:
        """Split a full dotted name into its innermost module and the parts after the module's name.

        The module is None if the name is in no module of this tree.
        """
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            module = self.module(".".join(parts[:end]))
            if module is not None:
                return module, parts[end:]
        return None, parts

    def _module_name(self, path: Path) -> str:
        parts = (self.package, *path.relative_to(self.root).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _parse(self, name: str) -> Module:
        path = self.paths[name]
        try:
            module = Module(name, path, ast.parse(self.text(name)))
        except SyntaxError as cause:
            detail = f"{path}:{cause.lineno} cannot be parsed by this Python ({cause.msg})"
            raise FrameworkSourceError(folder=self.root, detail=detail) from cause
        for node in statements(module.tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for local, full, _ in module.imported(node):
                    module.imports.setdefault(local, full)
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = (name for target in targets if target is not None for name in ast.walk(target))
            module.names.update({name.id: node for name in names if isinstance(name, ast.Name)})
            if name_of(node):
                module.names[name_of(node)] = node
        return module


def within(name: str, package: str) -> bool:
    """Return whether ``name`` equals ``package`` or is inside it. Both are full dotted names."""
    return name == package or name.startswith(f"{package}.")


def statements(body: Iterable[ast.AST]) -> Iterator[Definition | ast.Import | ast.ImportFrom]:
    """Yield the definitions, assignments and imports of a body, including those inside ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, Definition | ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from statements(ast.iter_child_nodes(node))


def functions(node: ast.AST) -> list[Function]:
    """Return the methods of a class; an empty list for other nodes."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [statement for statement in body if isinstance(statement, Function)]


def base_names(node: ast.ClassDef) -> list[str]:
    """Return the dotted names of a class's bases, without type arguments."""
    return [dotted(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]


def name_of(node: ast.AST) -> str:
    """Return the name of a function or class; an empty text for other nodes."""
    return getattr(node, "name", "")


def dotted(node: ast.AST) -> str:
    """Return a name or attribute as text, such as ``a.b.c``; an empty text for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""
