"""Outline a compiled graph: the layers that run, in order. Equal layers in a row appear once.

A layer is a list of blocks. A kernel is a block. Each use of a cluster, a group of ops compiled as one, is a block with
one row for each op. A view is a row in the block of the tensor that it views. Weights and arithmetic on sizes are
omitted. The module path of a block's op decides the layer: an op in ``layers.3.mlp`` belongs to layer 3.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from dlinfer.explanation.text import short_line
from dlinfer.graph.report.report import GraphReport, NodeReport

COLLAPSE_FROM = 3
"""The least number of equal layers in a row that the outline merges into one."""

Place = tuple[str, int]
"""A layer's place: (the path of a ModuleList, the layer's index in the list)."""


@dataclass
class Block:
    """One group of rows in the outline. kind: ``kernel``, ``cluster``, ``eager`` or ``view``."""

    kind: str
    title: str
    rows: list[NodeReport] = field(default_factory=list[NodeReport])

    def shape(self) -> tuple[object, ...]:
        """The facts about a block that the outline compares, before it merges two layers into one."""
        return self.kind, self.title.partition(" #")[0], [(row.op, row.result) for row in self.rows]


@dataclass
class Layer:
    """The blocks of one layer.

    place: the path of the ModuleList and the layer's index in it; None for blocks outside all layers.
    often: how many equal layers were merged into this one.
    """

    place: Place | None
    blocks: list[Block]
    often: int = 1

    @property
    def title(self) -> str:
        """``layers.0``, or ``layers.0 … 23`` for several layers."""
        if self.place is None:
            return "outside the layers"
        container, index = self.place
        last = f" … {index + self.often - 1}" if self.often > 1 else ""
        return f"{container}.{index}{last}"


def outline_of(graph: GraphReport) -> list[Layer]:
    blocks = _blocks(graph)
    indexed = [set(_indexed(_module(block))) for block in blocks]
    lengths = Counter(container for container, _ in set[Place]().union(*indexed))
    layers: list[Layer] = []
    by_place: dict[Place, Layer] = {}
    for block, places in zip(blocks, indexed, strict=True):
        listed = [place for place in places if lengths[place[0]] > 1]
        place = max(listed, key=lambda place: lengths[place[0]], default=None)
        layer = by_place.get(place) if place is not None else layers[-1] if layers else None
        if layer is None or layer.place != place:
            layers.append(layer := Layer(place, []))
            if place is not None:
                by_place[place] = layer
        layer.blocks.append(block)
    return list(_collapsed(layers))


def html_of(layers: Iterable[Layer]) -> str:
    """Return the outline as nested HTML lists. A row shows the facts about its node when the pointer is over it."""
    return "".join(
        f"<details open><summary>{escape(layer.title)}{f' <b>× {layer.often}</b>' if layer.often > 1 else ''}"
        f'</summary><ol class="blocks">{"".join(map(_block, layer.blocks))}</ol></details>'
        for layer in layers
    )


def hover_of(node: NodeReport) -> str:
    lines = [f"{node.name}: {node.op}", f"gives {node.result}", f"runs as {node.where}"]
    lines += [f"in {node.module}"] if node.module else []
    lines += [f"from {short_line(node.line)}"] if node.line else []
    lines += [f"reads {', '.join(node.reads)}"] if node.reads else []
    return "\n".join(lines)


def short_op(op: str) -> str:
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def _block(block: Block) -> str:
    rows = "".join(
        f'<li title="{escape(hover_of(row))}"><code>{escape(f"{short_op(row.op)}  {row.result}")}</code></li>'
        for row in block.rows
    )
    return f'<li class="{block.kind}">{escape(block.title)}<ul>{rows}</ul></li>'


def _blocks(graph: GraphReport) -> list[Block]:
    blocks: list[Block] = []
    of_node: dict[str, Block] = {}
    clusters: dict[str, Block] = {}
    for node in graph.nodes:
        if node.place == "size":
            continue
        block = clusters.get(node.how)
        if block is None and node.place == "view":
            block = next((of_node[name] for name in node.reads if name in of_node), None)
        if block is None:
            kind = node.place if node.place in ("view", "eager") else "kernel"
            kind, title = (
                ("cluster", node.how) if node.how.startswith("cluster") else (kind, short_op(node.op))
            )
            blocks.append(block := Block(kind, title))
            if kind == "cluster":
                clusters[node.how] = block
        of_node[node.name] = block
        block.rows.append(node)
    return blocks


def _module(block: Block) -> str:
    """Return the module of a block's last op that is no view.

    The last op decides: a residual add that is fused with the next layer's norm counts as part of the next layer.
    """
    computing = (row.module for row in reversed(block.rows) if row.place != "view" and row.module)
    return next(computing, block.rows[-1].module)


def _indexed(path: str) -> Iterator[Place]:
    """Yield a place for each index in a module's path. For ``a.3.b`` it is ("a", 3)."""
    for match in re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", path):
        yield path[: match.start()], int(match.group(1))


def _collapsed(layers: list[Layer]) -> Iterator[Layer]:
    """Yield the layers. At least COLLAPSE_FROM equal layers in a row are merged into one."""

    def key(pair: tuple[int, Layer]) -> tuple[object, ...]:
        number, layer = pair
        if layer.place is None:
            return (number,)
        return layer.place[0], layer.place[1] - number, [block.shape() for block in layer.blocks]

    for _, group in groupby(enumerate(layers), key):
        equal = [layer for _, layer in group]
        if len(equal) < COLLAPSE_FROM:
            yield from equal
        else:
            yield Layer(equal[0].place, equal[0].blocks, len(equal))
