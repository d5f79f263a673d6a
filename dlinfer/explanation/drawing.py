"""What of a compiled graph is drawn: boxes for what runs, frames for layers, a repeated layer once.

A kernel is a box, a use of a cluster is a box with a row for each op in it; views are rows of the box whose result
they view. Weights and arithmetic on sizes are left out. Layers are found by the paths of the modules.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from dlinfer.graph.report.report import GraphReport, NodeReport

COLLAPSE_FROM = 3
"""How many equal layers in a row are drawn as one."""


@dataclass
class Box:
    """One thing that runs, or comes in or goes out.

    kind: ``kernel``, ``cluster``, ``eager``, ``view``, ``input`` or ``output``. title: what it is called.
    layer: (container, index) of the layer that it belongs to.
    """

    number: int
    kind: str
    title: str
    rows: list[NodeReport] = field(default_factory=list)
    layer: tuple[str, int] | None = None


@dataclass
class Frame:
    """Boxes of one layer. ``often`` consecutive equal layers are drawn as this one."""

    title: str
    boxes: list[Box]
    often: int = 1


@dataclass
class Drawing:
    """Frames and loose boxes, all in running order, and the edges between boxes."""

    boxes: list[Box]
    frames: list[Frame]
    edges: list[tuple[int, int]]


def drawing_of(graph: GraphReport) -> Drawing:
    """Boxes, edges and frames of a graph."""
    boxes, edges = _boxes(graph)
    layers: dict[tuple[str, int], list[Box]] = {}
    for box in boxes:
        if box.layer is not None:
            layers.setdefault(box.layer, []).append(box)
    shapes = {layer: _shape(members, edges) for layer, members in layers.items()}
    runs = _runs(layers, shapes)
    drawn_as: dict[int, int] = {}  # a hidden box -> its like in the layer that is drawn
    frames = []
    for run in runs:
        shown = layers[run[0]]
        container, index = run[0]
        title = f"{container}.{index}" if len(run) == 1 else f"{container}.{index} … {run[-1][1]}"
        frames.append(Frame(title, shown, len(run)))
        for layer in run[1:]:
            drawn_as |= {b.number: like.number for b, like in zip(layers[layer], shown, strict=True)}
    kept = _kept_edges(edges, drawn_as, {number for run in runs for number in _numbers(layers[run[-1]])})
    boxes = _drawn_boxes(boxes, edges, drawn_as)
    numbers = _numbers(boxes)
    return Drawing(boxes, frames, [edge for edge in kept if numbers.issuperset(edge)])


def _numbers(boxes: list[Box]) -> set[int]:
    return {box.number for box in boxes}


def _kept_edges(edges, drawn_as: dict[int, int], lasts: set[int]) -> list[tuple[int, int]]:
    """Those into what is drawn. What leaves the last of several equal layers leaves the one that is drawn."""
    kept = []
    for source, target in edges:
        if target in drawn_as or (source in drawn_as and source not in lasts):
            continue
        kept.append((drawn_as.get(source, source), target))
    return list(dict.fromkeys(kept))


def _drawn_boxes(boxes: list[Box], edges, drawn_as: dict[int, int]) -> list[Box]:
    """Without hidden boxes, and without inputs that only they read."""
    readers: dict[int, set[int]] = {}
    for source, target in edges:
        readers.setdefault(source, set()).add(target)
    lost = {
        box.number
        for box in boxes
        if box.kind == "input" and drawn_as.keys() >= readers.get(box.number, set())
    }
    return [box for box in boxes if box.number not in drawn_as and box.number not in lost]


# --- boxes


def _boxes(graph: GraphReport) -> tuple[list[Box], list[tuple[int, int]]]:
    boxes: list[Box] = []
    of_node: dict[str, Box] = {}
    clusters: dict[str, Box] = {}

    def make(kind: str, title: str) -> Box:
        boxes.append(Box(len(boxes), kind, title))
        return boxes[-1]

    for given in graph.inputs:
        if not given.weight and "[" in given.result:
            box = of_node[given.name] = make("input", re.sub(r"^l_(kwargs_)?", "", given.name).rstrip("_"))
            box.rows.append(NodeReport(given.name, "input", "input", "", "", "", given.result, ()))
    for node in graph.nodes:
        if node.place == "size":
            continue
        source = next((of_node[name] for name in node.reads if name in of_node), None)
        if node.how.startswith("cluster"):
            box = clusters.get(node.how) or clusters.setdefault(node.how, make("cluster", node.how))
        elif node.place == "view":
            box = source if source is not None and source.kind != "input" else make("view", short_op(node.op))
        else:
            box = make("eager" if node.place == "eager" else "kernel", short_op(node.op))
        of_node[node.name] = box
        box.rows.append(node)
    output = make("output", "output")
    edges = [
        (of_node[name].number, of_node[node.name].number)
        for node in graph.nodes
        for name in node.reads
        if name in of_node and node.name in of_node and of_node[name] is not of_node[node.name]
    ]
    edges += [(of_node[name].number, output.number) for name in graph.outputs if name in of_node]
    boxes = _in_order(boxes, edges)
    _assign_layers(boxes)
    _assign_inputs(boxes, edges)
    return _without_unused_views(boxes, edges)


def _without_unused_views(boxes: list[Box], edges: list[tuple[int, int]]):
    """Views of inputs that only sizes or clusters' own copies of them needed say nothing."""
    used = {source for source, _ in edges}
    gone = {box.number for box in boxes if box.kind in ("view", "input") and box.number not in used}
    return [b for b in boxes if b.number not in gone], [e for e in edges if not gone.intersection(e)]


def _in_order(boxes: list[Box], edges: list[tuple[int, int]]) -> list[Box]:
    """Sorted so that edges go forward; among those that could come next, the one that was made first."""
    import heapq

    missing = Counter(target for _, target in set(edges))
    below: dict[int, list[int]] = {}
    for source, target in set(edges):
        below.setdefault(source, []).append(target)
    ready = [box.number for box in boxes if not missing[box.number]]
    heapq.heapify(ready)
    order = []
    while ready:
        number = heapq.heappop(ready)
        order.append(number)
        for target in below.get(number, ()):
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, target)
    rest = [box.number for box in boxes if box.number not in set(order)]
    by_number = {box.number: box for box in boxes}
    return [by_number[number] for number in (*order, *rest)]


def short_op(op: str) -> str:
    """``aten.linear`` -> ``linear``: what is written into a box."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


# --- layers


def _assign_layers(boxes: list[Box]) -> None:
    """A layer is the module of a list or sequence that a box's last op comes from, in the longest such list."""
    places = {box.number: list(_indexed(_module(box))) for box in boxes}
    lengths = Counter(container for container, _ in {place for found in places.values() for place in found})
    for box in boxes:
        found = [place for place in places[box.number] if lengths[place[0]] > 1]
        box.layer = max(found, key=lambda place: lengths[place[0]], default=None)


def _assign_inputs(boxes: list[Box], edges: list[tuple[int, int]]) -> None:
    """Inputs whose names differ only in a number (a KV cache a layer) belong to the layer that alone reads them."""
    layer_of = {box.number: box.layer for box in boxes}
    inputs = [box for box in boxes if box.kind == "input"]
    alike = Counter(re.sub(r"\d+", "#", box.title) for box in inputs)
    for box in inputs:
        readers = {layer_of[target] for source, target in edges if source == box.number}
        if alike[re.sub(r"\d+", "#", box.title)] > 1 and len(readers) == 1:
            box.layer = readers.pop()


def _module(box: Box) -> str:
    """The last op decides: a residual add that is fused with the next layer's norm belongs to that layer."""
    return next((row.module for row in reversed(box.rows) if row.place != "view" and row.module), "")


def _indexed(path: str):
    """``a.3.b`` -> ("a", 3) for each index in a module's path."""
    for match in re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", path):
        yield path[: match.start()], int(match.group(1))


def _shape(members: list[Box], edges: list[tuple[int, int]]) -> tuple:
    """What two layers have in common when they are the same: boxes, ops, results and edges between them."""
    position = {box.number: index for index, box in enumerate(members)}
    inner = sorted((position[a], position[b]) for a, b in set(edges) if a in position and b in position)
    titles = [(box.kind, "" if box.kind == "input" else box.title.partition(" #")[0]) for box in members]
    rows = [tuple((row.op, row.result) for row in box.rows) for box in members]
    return (tuple(titles), tuple(rows), tuple(inner))


def _runs(layers, shapes) -> list[list[tuple[str, int]]]:
    """Layers in order; equal neighbours together where there are enough of them."""
    runs: list[list[tuple[str, int]]] = []
    for layer in sorted(layers):
        previous = runs[-1][-1] if runs else None
        follows = previous is not None and previous[0] == layer[0] and previous[1] + 1 == layer[1]
        if follows and shapes[previous] == shapes[layer]:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [part for run in runs for part in ([run] if len(run) >= COLLAPSE_FROM else [[one] for one in run])]
