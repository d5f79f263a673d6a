"""What LMDeploy asks of this package: every name that it imports, and every call that it makes of one."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from dlinfer.framework.lmdeploy_ext.contract.source import Module, Tree, dotted, within

PACKAGE = "dlinfer"


@dataclass(frozen=True)
class Import:
    """One import of a name of ours. name: ``dlinfer.module`` or ``dlinfer.module.attribute``."""

    name: str
    module: Module
    line: int
    top: bool  # whether it runs as soon as the module is imported

    @property
    def definition(self) -> str:
        """The name of the definition around it; empty at the top of the module."""
        return "" if self.top else enclosing(self.module, self.line)


@dataclass(frozen=True)
class Call:
    """One call of a name of ours. name: dotted, as ``dlinfer.ops.rms_norm``."""

    name: str
    module: Module
    node: ast.Call

    @property
    def text(self) -> str:
        """The arguments as they are written, in one line: what is recorded of it."""
        arguments = [ast.unparse(arg) for arg in self.node.args]
        arguments += [
            f"{one.arg}={ast.unparse(one.value)}" if one.arg else f"**{ast.unparse(one.value)}"
            for one in self.node.keywords
        ]
        return ", ".join(arguments)

    @property
    def definition(self) -> str:
        """The name of the definition around it; empty at the top of the module."""
        return enclosing(self.module, self.node.lineno)


def enclosing(module: Module, line: int) -> str:
    """The top definition of a module that a line lies in; empty where none does."""
    for name, node in module.names.items():
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            return name
    return ""


def imports(tree: Tree) -> Iterator[Import]:
    """Every import of ours in LMDeploy, those inside functions included."""
    for module in tree.holding(PACKAGE):
        for _, target, inner, line in module.imported(module.tree):
            if within(target, PACKAGE):
                name = f"{target}.{inner}" if inner else target
                if name != PACKAGE:  # what `import dlinfer.ops` binds
                    yield Import(name, module, line, top=not enclosing(module, line))


def calls(tree: Tree) -> Iterator[Call]:
    """Every call that LMDeploy makes of a name of ours, by whatever name it knows it."""
    known = _known(tree)
    for module in tree.holding(PACKAGE, *_words(known)):
        local = known.get(module.name, {})
        local = local | {
            name: f"{target}.{inner}" if inner else target
            for name, target, inner, _ in module.imported(module.tree)
            if within(target, PACKAGE) and (inner or name != PACKAGE)
        }
        for node in ast.walk(module.tree):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            first, _, rest = name.partition(".")
            if first in local:
                full = f"{local[first]}.{rest}" if rest else local[first]
            elif first == PACKAGE and rest:
                full = name
            else:
                continue
            assert isinstance(node, ast.Call)
            yield Call(full, module, node)


def _known(tree: Tree) -> dict[str, dict[str, str]]:
    """Module -> {name at its top: name of ours that it stands for}, re-exports included."""
    known: dict[str, dict[str, str]] = {}
    for module in tree.holding(PACKAGE):
        for name, (target, inner) in module.imports.items():
            if within(target, PACKAGE) and inner:
                known.setdefault(module.name, {})[name] = f"{target}.{inner}"
    words = _words(known)
    modules = list(tree.holding(*words)) if words else []
    grew = True
    while grew:
        grew = False
        for module in modules:
            for name, (target, inner) in module.imports.items():
                ours = known.get(target, {}).get(inner)
                if ours is not None and name not in known.setdefault(module.name, {}):
                    known[module.name][name] = ours
                    grew = True
    return known


def _words(known: dict[str, dict[str, str]]) -> set[str]:
    return {name for names in known.values() for name in names}
