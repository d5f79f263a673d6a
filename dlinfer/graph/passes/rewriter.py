"""Edit a graph for a pass. New nodes get a fake result and a line of the model, and each edit is recorded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.dialect import call_on_fakes, fake, model_line, model_source
from dlinfer.graph.torch_private.fake_mode import FakeTensor, symbolic


@dataclass(frozen=True)
class Edit:
    """One change by a pass: its name, the nodes that it removed and added, and the line of the model."""

    what: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    line: str


@dataclass(frozen=True)
class RefusedMatch:
    """A match that a fusion rule did not replace: its pattern's last node, the reason, and the line of the model."""

    node: str
    reason: str
    line: str


def erase(what: str, node: fx.Node, by: fx.Node | None = None) -> Edit:
    """Erase a node, and let the node's users read ``by`` instead. Return the edit. what: the edit's name."""
    if by is not None:
        node.replace_all_uses_with(by)
    node.graph.erase_node(node)
    return Edit(what, (node.name,), () if by is None else (by.name,), model_line(node))


class Rewriter:
    """Inserts and replaces nodes of one graph, and records each edit."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph
        fakes = (fake(node) for node in self.graph.nodes)
        self.mode = next((value.fake_mode for value in fakes if isinstance(value, FakeTensor)), None)
        self.edits: list[Edit] = []

    def call(self, at: fx.Node, op: object, *args: object, **kwargs: object) -> fx.Node:
        """Insert a call of ``op`` before ``at``, and return the new node. The op runs on fakes.

        The new node has the model's line of ``at``.
        """
        node = self._insert(at, op, args, kwargs)
        node.meta["val"] = self.fake_call(op, *args, **kwargs)
        return node

    def call_like(self, old: fx.Node, at: fx.Node, op: object, *args: object, **kwargs: object) -> fx.Node:
        """Insert a call of ``op`` before ``at``, and return the new node, with the fake result of ``old``.

        The real result must have the dtype, sizes and strides of this fake. Views of the old result are then views of
        the new result. Unlike ``call``, this does not run the op on fakes, which would take about ten milliseconds with
        symbolic sizes.
        """
        node = self._insert(at, op, args, kwargs)
        node.meta["val"] = fake(old)
        return node

    def _insert(self, at: fx.Node, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        with self.graph.inserting_before(at):
            node = self.graph.call_function(op, args, kwargs)
        node.meta |= model_source(at)
        return node

    def fake_call(self, op: Any, *args: Any, **kwargs: Any) -> object:
        """Run ``op`` on the fakes of nodes, and return the fake result. Raises the errors of the op's fake function."""
        values, named = map_arg((args, kwargs), fake)
        with torch.no_grad() if self.mode is None else symbolic(self.mode):
            return call_on_fakes(op, values, named)

    def replace(
        self, what: str, old: Sequence[fx.Node], new: Sequence[fx.Node], interior: Iterable[fx.Node] = ()
    ) -> None:
        """Replace each old node by the new node at the same index, and record the edit under ``what``.

        Erases every old or ``interior`` node that nothing uses any more.
        """
        line = model_line(old[0])
        for before, after in zip(old, new, strict=True):
            before.replace_all_uses_with(after)
        removed: list[str] = []
        for node in sorted(dict.fromkeys([*old, *interior]), reverse=True):
            if not node.users and node.op != "placeholder":
                removed.append(node.name)
                self.graph.erase_node(node)
        added = tuple(dict.fromkeys(node.name for node in new))
        self.edits.append(Edit(what, tuple(reversed(removed)), added, line))
