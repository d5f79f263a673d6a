"""LMDeploy's imports and calls of ours against what this package has."""

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from dlinfer.framework.lmdeploy_ext.contract.asked import Call, Import, calls, imports
from dlinfer.framework.lmdeploy_ext.contract.drift import Drift, Elsewhere, Kind
from dlinfer.framework.lmdeploy_ext.contract.reach import Reach
from dlinfer.framework.lmdeploy_ext.contract.records import Record
from dlinfer.framework.lmdeploy_ext.contract.signatures import crossed, misfit, unknown_keyword
from dlinfer.framework.lmdeploy_ext.contract.source import Tree
from dlinfer.ops import OpSpec

OPS = "dlinfer.ops."
_PROVIDE = "provide the name, or refuse by name what leads to it (framework/lmdeploy_ext/checks)"
_BIND = "call the op as LMDeploy does in tests/ops/test_lmdeploy_calls.py and change the op's python_call to take it"
_LOOK = "read the call, see that it still means what our op does, then record the release"


class Asked:
    """All that one source asks of us."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.imports = list(imports(tree))
        self.calls = list(calls(tree))

    @property
    def names(self) -> list[str]:
        """Names that are imported, sorted."""
        return sorted({one.name for one in self.imports})

    def texts(self) -> dict[str, list[str]]:
        """Op -> the arguments of its calls."""
        found: dict[str, set[str]] = {}
        for one in self.calls:
            if one.name.startswith(OPS):
                found.setdefault(one.name.removeprefix(OPS), set()).add(one.text)
        return {op: sorted(texts) for op, texts in sorted(found.items())}

    def compare(self, reach: Reach, record: Record) -> Iterator[Drift | Elsewhere]:
        """What does not fit, or is not reached on the device."""
        for one in self.imports:
            if resolve(one.name) is _MISSING:
                yield from self._missing(one, reach)
        for one in self.calls:
            yield from self._call(one, reach, record)
        yield from self._no_longer(record)

    def _missing(self, one: Import, reach: Reach) -> Iterator[Drift | Elsewhere]:
        where = self.tree.where(one.module, one.line)
        device, reason = reach.why_not(one.module, one.definition, one.name)
        if reason:
            yield Elsewhere(one.name, where, device, reason)
        else:
            yield Drift(
                "missing", "essential", where, f"import of {one.name}", "nothing of that name", _PROVIDE
            )

    def _call(self, one: Call, reach: Reach, record: Record) -> Iterator[Drift | Elsewhere]:
        target = resolve(one.name)
        where = self.tree.where(one.module, one.node.lineno)
        used = f"{one.name}({one.text})"
        device, reason = reach.why_not(one.module, one.definition, one.name)
        if target is _MISSING:
            if not one.name.startswith(OPS):
                return  # the import of it is told of
            if reason:
                yield Elsewhere(one.name, where, device, reason)
            else:
                yield Drift("missing", "essential", where, used, "no op of that name", _PROVIDE)
            return
        found = self._differs(one, target, record)
        if found is None:
            return
        kind, offered, step = found
        if reason:
            yield Elsewhere(f"{one.name}: {kind}", where, device, reason)
        else:
            yield Drift(kind, "essential", where, used, offered, step)

    def _differs(self, one: Call, target: Any, record: Record) -> tuple[Kind, str, str] | None:
        signature = _signature(target)
        if signature is None:
            return None
        offered = f"{one.name.rpartition('.')[2]}{_short(signature)}"
        keyword = unknown_keyword(one.node, signature)
        if keyword:
            return "unknown keyword", f"{offered}, which has no {keyword!r}", _BIND
        why = misfit(one.node, signature) or (
            crossed(one.node, signature) if isinstance(target, OpSpec) else ""
        )
        if why:
            return "misbinding", f"{offered}: {why}", _BIND
        if isinstance(target, OpSpec):
            known = record.calls.get(one.name.removeprefix(OPS), [])
            if one.text not in known:
                was = " or ".join(f"({text})" for text in known) or "no call"
                return "changed call", f"{offered}; LMDeploy {record.version} has {was}", _LOOK
        return None

    def _no_longer(self, record: Record) -> Iterator[Drift]:
        step = "see what LMDeploy does instead: what we offer there is not used any more"
        gone = [(name, f"the name {name}") for name in record.names if name not in self.names]
        now = self.texts()
        gone += [(OPS + op, f"the op {op}") for op in record.calls if op not in now]
        for name, words in gone:
            where = f"{self.tree.package}, version {self.tree.version}"
            yield Drift("no longer used", "optional", where, f"nothing ({name})", words, step)


_MISSING = object()


def resolve(name: str) -> Any:
    """What a dotted name of ours means here, or a mark that nothing does."""
    first, *parts = name.split(".")
    found: Any = importlib.import_module(first)
    for part in parts:
        inner = getattr(found, part, _MISSING)  # first: `dlinfer.ops.linear` is an op, and a module as well
        if inner is _MISSING and isinstance(found, ModuleType):
            try:
                inner = importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError:
                return _MISSING
        if inner is _MISSING:
            return _MISSING
        found = inner
    return found


def _signature(target: Any) -> inspect.Signature | None:
    if isinstance(target, OpSpec):
        return target.signature()
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def _short(signature: inspect.Signature) -> str:
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
