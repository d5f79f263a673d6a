"""Finds LMDeploy's imports from ``dlinfer`` and its calls of ``dlinfer``, and compares them with this package."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dlinfer.framework.lmdeploy_ext.contract.drift import Drift, Elsewhere, Kind
from dlinfer.framework.lmdeploy_ext.contract.reach import Reach
from dlinfer.framework.lmdeploy_ext.contract.records import Record
from dlinfer.framework.lmdeploy_ext.contract.signatures import crossed, misfit, unknown_keyword
from dlinfer.framework.lmdeploy_ext.contract.source import Module, Tree, dotted, within
from dlinfer.ops import OpSpec

PACKAGE = "dlinfer"
OPS = "dlinfer.ops."
_PROVIDE = "provide the name, or refuse the feature that needs it (framework/lmdeploy_ext/checks)"
_BIND = (
    "add LMDeploy's call to tests/ops/test_lmdeploy_calls.py, and change the op's python_call to accept it"
)
_LOOK = "read the call, check that it still means what our op computes, then record the release"
_NO_LONGER = "find out what LMDeploy does instead: it no longer uses what we offer"
_MISSING = object()


@dataclass(frozen=True)
class Use:
    """One place where LMDeploy imports or calls a name of ``dlinfer``.

    name: the dotted name, such as ``dlinfer.ops.rms_norm``. module: LMDeploy's module. call: None for an import.
    """

    name: str
    module: Module
    line: int
    call: ast.Call | None = None

    @property
    def text(self) -> str:
        """The source text of the call's arguments, on one line. Records store calls in this form."""
        assert self.call is not None
        return ", ".join(ast.unparse(part) for part in (*self.call.args, *self.call.keywords))


def imports(tree: Tree) -> Iterator[Use]:
    """Yield every import of a ``dlinfer`` name in LMDeploy, including imports inside functions."""
    for module in tree.holding(PACKAGE):
        for _, name, line in module.imported(module.tree):
            if name.startswith(f"{PACKAGE}."):
                yield Use(name, module, line)


def calls(tree: Tree) -> Iterator[Use]:
    """Yield every call of a ``dlinfer`` name in LMDeploy.

    A module of LMDeploy may re-export a ``dlinfer`` name. Calls of the re-exported name are included.
    """
    holders = list(tree.holding(PACKAGE))
    words = {local for module in holders for local, name in module.imports.items() if within(name, PACKAGE)}
    for module in tree.holding(PACKAGE, *words):
        origins = {local: tree.origin(name) for local, name, _ in module.imported(module.tree)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                first, dot, rest = dotted(node.func).partition(".")
                name = f"{origins.get(first, '')}{dot}{rest}"
                if name.startswith(f"{PACKAGE}."):
                    yield Use(name, module, node.lineno, node)


class Asked:
    """All imports and calls of ``dlinfer`` names in one LMDeploy source tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.imports = list(imports(tree))
        self.calls = list(calls(tree))
        self.names = sorted({use.name for use in self.imports})

    def texts(self) -> dict[str, list[str]]:
        """Return a dict from op name to the argument texts of LMDeploy's calls of this op, sorted and distinct."""
        texts: dict[str, set[str]] = {}
        for use in self.calls:
            if use.name.startswith(OPS):
                texts.setdefault(use.name.removeprefix(OPS), set()).add(use.text)
        return {op: sorted(arguments) for op, arguments in sorted(texts.items())}

    def compare(self, reach: Reach, record: Record) -> Iterator[Drift | Elsewhere]:
        """Yield a finding for each import or call of ``dlinfer`` that this package cannot serve as LMDeploy uses it.

        The finding is a Drift, or an Elsewhere if the checked device never runs the code. A name or an op that the
        reviewed release used, but this LMDeploy source no longer uses, gives a Drift too.

        reach: finds the code that the checked device runs. record: the reviewed LMDeploy release to compare with.
        """
        for use in (*self.imports, *self.calls):
            differs = _differs(use, record)
            if differs is None:
                continue
            kind, used, offered, step = differs
            where = self.tree.where(use.module, use.line)
            device, reason = reach.why_not(use.module, use.module.enclosing(use.line), use.name)
            if reason:
                yield Elsewhere(
                    use.name if kind == "missing" else f"{use.name}: {kind}", where, device, reason
                )
            else:
                yield Drift(kind, "essential", where, used, offered, step)
        called = self.texts()
        gone = [(name, f"the name {name}") for name in record.names if name not in self.names]
        gone += [(OPS + op, f"the op {op}") for op in record.calls if op not in called]
        for name, offered in gone:
            where = f"{self.tree.package}, version {self.tree.version}"
            yield Drift("no longer used", "optional", where, f"nothing ({name})", offered, _NO_LONGER)


def _differs(use: Use, record: Record) -> tuple[Kind, str, str, str] | None:
    """Return (kind, used, offered, next step) of a Drift if LMDeploy's use differs from ``dlinfer``; else None.

    An import differs if ``dlinfer`` lacks the name. A call differs if ``dlinfer`` lacks the op, or if the arguments do
    not bind to the signature. A call of an op also differs if the reviewed release ``record`` has no call with the same
    arguments.
    """
    target = resolve(use.name)
    if use.call is None:
        is_missing = target is _MISSING
        return ("missing", f"import of {use.name}", "nothing of that name", _PROVIDE) if is_missing else None
    used = f"{use.name}({use.text})"
    if target is _MISSING:  # ops only: a missing other name was reported at its import
        is_op = use.name.startswith(OPS)
        return ("missing", used, "no op of that name", _PROVIDE) if is_op else None
    is_op = isinstance(target, OpSpec)
    try:
        signature = target.signature() if is_op else inspect.signature(target)
    except (TypeError, ValueError):
        return None
    offered = f"{use.name.rpartition('.')[2]}{_short(signature)}"
    if keyword := unknown_keyword(use.call, signature):
        return "unknown keyword", used, f"{offered}, which has no {keyword!r}", _BIND
    if why := misfit(use.call, signature) or (crossed(use.call, signature) if is_op else ""):
        return "misbinding", used, f"{offered}: {why}", _BIND
    known = record.calls.get(use.name.removeprefix(OPS), [])
    if is_op and use.text not in known:
        before = " or ".join(f"({text})" for text in known) or "no call"
        return "changed call", used, f"{offered}; LMDeploy {record.version} has {before}", _LOOK
    return None


def resolve(name: str) -> Any:
    """Return the object with this dotted ``dlinfer`` name; ``_MISSING`` if there is none."""
    first, *parts = name.split(".")
    target: Any = importlib.import_module(first)
    for part in parts:
        # Attributes first: `dlinfer.ops.linear` is an op, and a module as well.
        inner = getattr(target, part, _MISSING)
        if inner is _MISSING and isinstance(target, ModuleType):
            try:
                inner = importlib.import_module(f"{target.__name__}.{part}")
            except ModuleNotFoundError:
                return _MISSING
        target = inner
    return target


def _short(signature: inspect.Signature) -> str:
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
