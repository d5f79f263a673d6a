"""What of LMDeploy's dlinfer backend a device reaches, from the BuildSpecs that are built there.

A device of ours builds some specs with layers of its own and refuses others by name (``running/backend.py``); what only
those would reach is no part of the contract there.
"""

import ast
from collections.abc import Iterator
from functools import cached_property

from dlinfer.framework.lmdeploy_ext.contract.ours import Adaptor
from dlinfer.framework.lmdeploy_ext.contract.source import (
    Found,
    Function,
    Module,
    Tree,
    dotted,
    within,
)

BACKENDS = "lmdeploy.pytorch.backends"
KERNELS = "lmdeploy.pytorch.kernels"
BACKEND = f"{BACKENDS}.dlinfer.op_backend"
VENDORS = ("ascend", "maca", "camb")
"""LMDeploy's device types that have a backend of their own upon its dlinfer backend."""

_BUILD = "build_op"
_FOLLOWED = (f"{BACKENDS}.dlinfer", f"{BACKENDS}.default", f"{KERNELS}.dlinfer", f"{KERNELS}.default")


def vendor_of(module: str, name: str) -> str:
    """The one device that a module of LMDeploy's, or a name of ours that it asks for, is meant for; else empty."""
    for device in VENDORS:
        if within(module, f"{BACKENDS}.dlinfer.{device}") or f".{device}" in name or f"_{device}" in name:
            return device
        if f"{device}_" in name:
            return device
    return ""


def branches(function: Function) -> Iterator[tuple[str, list[ast.stmt]]]:
    """(BuildSpec, what builds it) of LMDeploy's ``build_op``: each ``if isinstance(spec, ...)`` of it."""
    for node in ast.walk(function):
        if not isinstance(node, ast.If) or not isinstance(node.test, ast.Call):
            continue
        if dotted(node.test.func) == "isinstance" and len(node.test.args) == 2:
            kinds = node.test.args[1]
            for kind in kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]:
                yield dotted(kind).rpartition(".")[2], node.body


class Reach:
    """The definitions that one device can come to."""

    def __init__(self, tree: Tree, adaptor: Adaptor, device: str) -> None:
        self.tree, self.adaptor, self.device = tree, adaptor, device

    @cached_property
    def builders(self) -> dict[str, list[str]]:
        """BuildSpec -> the backends of LMDeploy's, from ours upwards, that build it."""
        found: dict[str, list[str]] = {}
        for one in self._chain:
            function = self._method(one, _BUILD)
            for spec, _ in branches(function) if function is not None else ():
                found.setdefault(spec, []).append(getattr(one.node, "name", ""))
        return found

    @cached_property
    def definitions(self) -> set[tuple[str, str]]:
        """(module, top definition) of everything reached."""
        seen: set[tuple[str, str]] = set()
        waiting = list(self._roots())
        while waiting:
            found = waiting.pop()
            key = (found.module.name, getattr(found.node, "name", ""))
            if key not in seen:
                seen.add(key)
                waiting += self._named(found.module, found.node)
        return seen

    def why_not(self, module: Module, definition: str, name: str) -> tuple[str, str]:
        """(device, reason) where a place in LMDeploy is not reached on this device; two empty words where it is."""
        vendor = vendor_of(module.name, name)
        if vendor and vendor != self.device:
            return vendor, f"reached on {vendor} only"
        if self.device in VENDORS or not any(within(module.name, one) for one in _FOLLOWED):
            return "", ""
        if not definition or (module.name, definition) in self.definitions:
            return "", ""
        return "", f"no layer that {self.device} builds calls it"

    @cached_property
    def _chain(self) -> list[Found]:
        found = self.tree.find(BACKEND, "DlinferOpsBackend")
        return self.tree.bases(found) if found is not None else []

    def _method(self, found: Found, name: str) -> Function | None:
        body = found.node.body if isinstance(found.node, ast.ClassDef) else []
        return next((one for one in body if isinstance(one, Function) and one.name == name), None)

    def _roots(self) -> Iterator[Found]:
        """What is built of the specs that are not ours, the backends' other methods, and what our layers take of
        LMDeploy."""
        out = set(self.adaptor.own_specs)
        done = set(out)
        for one in self._chain:
            assert isinstance(one.node, ast.ClassDef)
            for node in one.node.body:
                if not isinstance(node, Function):
                    continue
                if node.name != _BUILD:
                    yield from self._named(one.module, node)
                    continue
                for spec, body in branches(node):
                    if spec not in done:
                        done.add(spec)
                        for statement in body:
                            yield from self._named(one.module, statement)
        for taken in self.adaptor.takes:
            found = self.tree.find(taken.module, taken.name) if taken.name else None
            if found is not None and isinstance(found.node, Function | ast.ClassDef):
                if getattr(found.node, "name", "") == "DlinferOpsBackend":
                    continue  # walked above, branch by branch
                yield found

    def _named(self, module: Module, node: ast.AST) -> Iterator[Found]:
        """The followed definitions that a node names or imports."""
        found = [self.tree.find(target, inner) for _, target, inner, _ in module.imported(node) if inner]
        for one in ast.walk(node):
            name = dotted(one) if isinstance(one, ast.Name | ast.Attribute) else ""
            if name:
                found.append(self.tree.look(module, name))
        for one in found:
            if (
                one is not None
                and isinstance(one.node, Function | ast.ClassDef)
                and one.owner is None
                and any(within(one.module.name, part) for part in _FOLLOWED)
            ):
                yield one
