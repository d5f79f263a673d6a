"""Finds the definitions in LMDeploy's dlinfer backend that can run on a device.

The comparison of LMDeploy with this package uses the result in order to skip code that never runs. LMDeploy's dlinfer
backend builds a layer for each BuildSpec. On our devices, our own backend (``running/backend.py``) builds the layers of
some BuildSpecs itself, and refuses some other BuildSpecs. If LMDeploy uses a definition only for BuildSpecs that our
backend builds or refuses, the definition never runs, and may differ from what this package offers.
"""

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from dlinfer.framework.lmdeploy_ext.contract.ours import Adaptor
from dlinfer.framework.lmdeploy_ext.contract.source import (
    Found,
    Function,
    Module,
    Tree,
    dotted,
    functions,
    name_of,
    within,
)

BACKENDS = "lmdeploy.pytorch.backends"
_KERNELS = "lmdeploy.pytorch.kernels"
_BACKEND = "DlinferOpsBackend"
VENDORS = ("ascend", "maca", "camb")
"""LMDeploy's device types whose backend extends its dlinfer backend."""

_BUILD = "build_op"
_FOLLOWED = (f"{BACKENDS}.dlinfer", f"{BACKENDS}.default", f"{_KERNELS}.dlinfer", f"{_KERNELS}.default")


def vendor_of(module: str, name: str) -> str:
    """Return the vendor's device that a use of ``name`` in ``module`` is meant for; empty if it may be any device.

    module: a module of LMDeploy's. name: a ``dlinfer`` name. Either one may contain the name of a vendor's device.
    """
    for device in VENDORS:
        if within(module, f"{BACKENDS}.dlinfer.{device}") or re.search(rf"[._]{device}|{device}_", name):
            return device
    return ""


class Reach:
    """Finds the definitions in LMDeploy's dlinfer backend that can run on one device.

    tree: LMDeploy's source. adaptor: our adaptor's source. device: the device type.
    """

    def __init__(self, tree: Tree, adaptor: Adaptor, device: str) -> None:
        self.tree, self.adaptor, self.device = tree, adaptor, device
        backend = tree.find(f"{BACKENDS}.dlinfer.op_backend.{_BACKEND}")
        self._chain = tree.bases(backend) if backend is not None else []

    @cached_property
    def builders(self) -> dict[str, list[str]]:
        """A dict from BuildSpec to names of LMDeploy's backend classes that build it, subclasses before their bases."""
        builders: dict[str, list[str]] = {}
        for backend, spec, _ in self._branches:
            builders.setdefault(spec, []).append(name_of(backend.node))
        return builders

    @cached_property
    def definitions(self) -> set[tuple[str, str]]:
        """(module, name) of every top-level definition of LMDeploy's that can run on the device."""
        seen: set[tuple[str, str]] = set()
        waiting = list(self._roots())
        while waiting:
            definition = waiting.pop()
            key = (definition.module.name, name_of(definition.node))
            if key not in seen:
                seen.add(key)
                waiting += self._named(definition.module, definition.node)
        return seen

    def why_not(self, module: Module, definition: str, name: str) -> tuple[str, str]:
        """Return (vendor, reason) if this device does not run a definition of LMDeploy's; else two empty strings.

        module, definition: the module and the name of LMDeploy's top-level definition. name: the ``dlinfer`` name that
        the definition uses. The returned vendor is the only device that runs the definition, or empty if that is not
        known.
        """
        vendor = vendor_of(module.name, name)
        if vendor and vendor != self.device:
            return vendor, f"reached on {vendor} only"
        if self.device in VENDORS or not any(within(module.name, room) for room in _FOLLOWED):
            return "", ""
        if not definition or (module.name, definition) in self.definitions:
            return "", ""
        return "", f"no layer that {self.device} builds calls it"

    @cached_property
    def _branches(self) -> list[tuple[Found, str, list[ast.stmt]]]:
        """(backend class, BuildSpec, statements) of each branch ``if isinstance(spec, ...)`` in ``build_op``."""
        return [
            (backend, dotted(kind).rpartition(".")[2], node.body)
            for backend in self._chain
            for function in functions(backend.node)
            if function.name == _BUILD
            for node in ast.walk(function)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Call)
            if dotted(node.test.func) == "isinstance" and len(node.test.args) == 2
            for kind in getattr(node.test.args[1], "elts", [node.test.args[1]])
        ]

    def _roots(self) -> Iterator[Found]:
        """Yield the definitions that the device runs directly. ``definitions`` then follows the names that they use.

        These definitions are named in one of three places:

        - a branch of ``build_op`` for a BuildSpec that our backend does not build;
        - another method of a backend class;
        - an import of our adaptor.
        """
        done = set(self.adaptor.own_specs)
        for backend, spec, body in self._branches:
            if spec not in done:
                done.add(spec)
                for statement in body:
                    yield from self._named(backend.module, statement)
        for backend in self._chain:
            for function in functions(backend.node):
                if function.name != _BUILD:
                    yield from self._named(backend.module, function)
        for taken in self.adaptor.takes:
            definition = self.tree.find(taken.name)
            node = definition.node if definition is not None else None
            # The backend itself was walked above, branch by branch.
            if definition is not None and isinstance(node, Function | ast.ClassDef) and node.name != _BACKEND:
                yield definition

    def _named(self, module: Module, node: ast.AST) -> Iterator[Found]:
        """Yield the definitions in the packages of ``_FOLLOWED`` that a syntax node names or imports.

        Only top-level definitions count. module: the module of ``node``.
        """
        names = [name for _, name, _ in module.imported(node)]
        names += [module.full(name) for inner in ast.walk(node) if (name := dotted(inner))]
        for definition in map(self.tree.find, names):
            if (
                definition is not None
                and isinstance(definition.node, Function | ast.ClassDef)
                and definition.owner is None
                and any(within(definition.module.name, room) for room in _FOLLOWED)
            ):
                yield definition
