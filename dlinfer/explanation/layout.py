"""Layered layout of a directed graph, top down: Sugiyama's method in its simplest form.

(K. Sugiyama, S. Tagawa, M. Toda: Methods for Visual Understanding of Hierarchical System Structures, 1981.)
Vertices get layers by longest path, edges over several layers get a waypoint in each, the order within a layer comes
from barycentres and the horizontal place from neighbours. Written here because the libraries there are need a system
binary or a licence that does not fit; compiled models are nearly chains, for which this is enough.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

Vertex = TypeVar("Vertex", bound=Hashable)
Point = tuple[float, float]

_SWEEPS = 12
_WAYPOINT = 10.0
"""Width that a passing edge takes, in pixels."""


@dataclass
class Layout:
    """centres: middle of each vertex. routes: points of each edge from its upper to its lower end, in pixels.

    A route goes straight through a layer and bends between two: its segments are straight and bent in turn.
    """

    centres: dict = field(default_factory=dict)
    routes: dict = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0


def layout(
    sizes: Mapping[Vertex, Point],
    edges: Sequence[tuple[Vertex, Vertex]],
    *,
    first: Sequence[Vertex] = (),
    last: Sequence[Vertex] = (),
    gap: Point = (26.0, 34.0),
) -> Layout:
    """Place vertices of (width, height) pixels, listed in an order in which every edge goes forward.

    first, last: vertices kept in the top or bottom layer. gap: between neighbours and between layers.
    Edges against the order are left out of the layers but get a route.
    """
    if not sizes:
        return Layout()
    layers, chains = _layers(sizes, edges, first, last)
    _order(layers, chains)
    widths = {
        vertex: sizes[vertex][0] if vertex in sizes else _WAYPOINT for layer in layers for vertex in layer
    }
    xs = _columns(layers, chains, widths, gap[0])
    return _placed(sizes, layers, chains, xs, widths, gap[1])


def _layers(sizes, edges, first, last):
    """Vertices by layer, and each edge as the chain of vertices and waypoints that it runs through."""
    number = {vertex: index for index, vertex in enumerate(sizes)}
    forward = [(a, b) for a, b in dict.fromkeys(edges) if number[a] < number[b]]
    below = {vertex: [] for vertex in sizes}
    above = {vertex: [] for vertex in sizes}
    for a, b in forward:
        below[a].append(b)
        above[b].append(a)
    depth: dict = {}
    for vertex in sizes:
        lowest = 1 if first and vertex not in first else 0
        depth[vertex] = max((depth[parent] + 1 for parent in above[vertex]), default=lowest)
    for vertex in reversed(list(sizes)):  # what nothing feeds stands right above what it feeds
        if vertex not in first and not above[vertex] and below[vertex]:
            depth[vertex] = max(depth[vertex], min(depth[child] for child in below[vertex]) - 1)
    bottom = max([depth[vertex] for vertex in sizes if vertex not in last], default=0) + (1 if last else 0)
    depth |= dict.fromkeys(last, bottom)
    layers: list[list] = [[] for _ in range(max(depth.values()) + 1)]
    for vertex in sizes:
        layers[depth[vertex]].append(vertex)
    chains = {}
    for a, b in forward:
        points = [(a, b, level) for level in range(depth[a] + 1, depth[b])]
        for level, point in enumerate(points, depth[a] + 1):
            layers[level].append(point)
        chains[a, b] = [a, *points, b]
    return layers, chains


def _neighbours(chains) -> tuple[dict, dict]:
    up: dict = {}
    down: dict = {}
    for chain in chains.values():
        for a, b in pairwise(chain):
            down.setdefault(a, []).append(b)
            up.setdefault(b, []).append(a)
    return up, down


def _order(layers, chains) -> None:
    """Sort each layer by the mean position of its neighbours, downwards and upwards in turn."""
    up, down = _neighbours(chains)
    place = {vertex: float(index) for layer in layers for index, vertex in enumerate(layer)}
    best, fewest = [list(layer) for layer in layers], _crossings(layers, down)
    for sweep in range(_SWEEPS):
        around = up if sweep % 2 == 0 else down
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            keys = {v: _mean([place[n] for n in around.get(v, ())], place[v]) for v in layer}
            layer.sort(key=keys.__getitem__)
            place |= {vertex: float(index) for index, vertex in enumerate(layer)}
        crossings = _crossings(layers, down)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    layers[:] = best


def _crossings(layers, down) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        index = {vertex: position for position, vertex in enumerate(lower)}
        ends = [
            index[child] for vertex in upper for child in sorted(down.get(vertex, ()), key=index.__getitem__)
        ]
        count += sum(a > b for position, a in enumerate(ends) for b in ends[position + 1 :])
    return count


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _columns(layers, chains, widths, gap: float) -> dict:
    """Horizontal middles: near the neighbours', in the layer's order, no two closer than the gap."""
    up, down = _neighbours(chains)
    xs: dict = {}
    for layer in layers:
        left = 0.0
        for vertex in layer:
            xs[vertex] = left + widths[vertex] / 2
            left += widths[vertex] + gap
    for sweep in range(_SWEEPS):
        around = up if sweep % 2 == 0 else down
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wished = [_mean([xs[n] for n in around.get(vertex, ())], xs[vertex]) for vertex in layer]
            xs |= zip(layer, _apart(wished, [widths[vertex] for vertex in layer], gap), strict=True)
    shift = min(xs[vertex] - widths[vertex] / 2 for vertex in xs)
    return {vertex: x - shift for vertex, x in xs.items()}


def _apart(wished: list[float], widths: list[float], gap: float) -> list[float]:
    """The places nearest to the wished ones (least squares) that keep order and distance: pool adjacent violators."""
    offsets = [0.0]
    for a, b in pairwise(widths):
        offsets.append(offsets[-1] + (a + b) / 2 + gap)
    blocks: list[tuple[float, int]] = []  # mean, count
    for wish, offset in zip(wished, offsets, strict=True):
        mean, count = wish - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, more = blocks.pop()
            mean = (mean * count + other * more) / (count + more)
            count += more
        blocks.append((mean, count))
    means = [mean for mean, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _placed(sizes, layers, chains, xs, widths, gap: float) -> Layout:
    made = Layout(width=max(xs[vertex] + widths[vertex] / 2 for vertex in xs))
    heights = [
        max((sizes[vertex][1] for vertex in layer if vertex in sizes), default=0.0) for layer in layers
    ]
    top = 0.0
    spans: dict = {}
    rims: dict = {}  # of the layer that a vertex stands in, which may be higher than itself
    for layer, height in zip(layers, heights, strict=True):
        for vertex in layer:
            rims[vertex] = (top, top + height)
            own = sizes[vertex][1] if vertex in sizes else height
            spans[vertex] = (top + (height - own) / 2, top + (height + own) / 2)
            if vertex in sizes:
                made.centres[vertex] = (xs[vertex], top + height / 2)
        top += height + gap
    made.height = top - gap
    for edge, chain in chains.items():
        first, last = chain[0], chain[-1]
        points: list[Point] = [(xs[first], spans[first][1]), (xs[first], rims[first][1])]
        for waypoint in chain[1:-1]:
            points += [(xs[waypoint], rims[waypoint][0]), (xs[waypoint], rims[waypoint][1])]
        made.routes[edge] = [*points, (xs[last], rims[last][0]), (xs[last], spans[last][0])]
    return made
