"""The drawing of a compiled graph as one SVG element: frames are laid out by themselves, then placed as boxes are."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

from dlinfer.explanation.drawing import Box, Drawing, Frame, drawing_of, short_op
from dlinfer.explanation.layout import Point, layout
from dlinfer.explanation.text import short_line
from dlinfer.graph.report.report import GraphReport, NodeReport

_TITLE, _ROW, _PAD = 19.0, 15.0, 9.0  # pixels: height of a title line, of a row, and the space around them
_TITLE_CHAR, _ROW_CHAR = 7.3, 6.7  # width of a character of each, monospaced
_MOST_ROWS, _MOST_CHARS = 9, 46
_MARGIN = 14.0


@dataclass
class _Line:
    """A line of text in a box. hover: what is said of it; empty for none."""

    text: str
    hover: str = ""
    muted: bool = False


@dataclass
class _Figure:
    """A box with its lines and its size in pixels."""

    box: Box
    lines: list[_Line]
    size: Point = (0.0, 0.0)


@dataclass
class _Picture:
    """SVG elements so far: edges below boxes."""

    edges: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)


def svg_of(graph: GraphReport) -> str:
    """Return the graph drawn; an empty string where it has no nodes."""
    drawing = drawing_of(graph)
    if not drawing.boxes:
        return ""
    figures = {box.number: _figure(box) for box in drawing.boxes}
    frame_of = {box.number: frame for frame in drawing.frames for box in frame.boxes}
    insides = {id(frame): _Inside(frame, drawing, figures) for frame in drawing.frames}
    return _whole(drawing, figures, frame_of, insides)


class _Inside:
    """The layout of one frame: its boxes, and a port for each box outside that has an edge into or out of it."""

    def __init__(self, frame: Frame, drawing: Drawing, figures: dict[int, _Figure]) -> None:
        self.frame = frame
        members = {box.number for box in frame.boxes}
        entering = [(a, b) for a, b in drawing.edges if b in members and a not in members]
        leaving = [(a, b) for a, b in drawing.edges if a in members and b not in members]
        self.tops = list(dict.fromkeys(("from", a) for a, _ in entering))
        self.bottoms = list(dict.fromkeys(("to", b) for _, b in leaving))
        sizes: dict[Any, Point] = dict.fromkeys(self.tops, (0.0, 0.0))
        sizes |= {box.number: figures[box.number].size for box in frame.boxes}
        sizes |= dict.fromkeys(self.bottoms, (0.0, 0.0))
        inner = [(a, b) for a, b in drawing.edges if a in members and b in members]
        edges: list[tuple[Any, Any]] = [(("from", a), b) for a, b in entering]
        edges += [*inner, *((a, ("to", b)) for a, b in leaving)]
        self.layout = layout(sizes, edges, first=self.tops, last=self.bottoms, gap=(24.0, 26.0))
        label = _width(f"{frame.title}  × {frame.often}", _TITLE_CHAR)
        self.inset = max(0.0, (label - self.layout.width) / 2) + _PAD
        self.size = (self.layout.width + 2 * self.inset, self.layout.height + _TITLE)

    def port(self, port: tuple[str, int]) -> float:
        """Horizontal distance of a port from the frame's middle."""
        return self.layout.centres[port][0] + self.inset - self.size[0] / 2


def _whole(
    drawing: Drawing, figures: dict[int, _Figure], frame_of: dict[int, Frame], insides: dict[int, _Inside]
) -> str:
    def outer(number: int) -> Any:
        return ("frame", id(frame_of[number])) if number in frame_of else number

    sizes: dict[Any, Point] = {}
    for box in drawing.boxes:
        vertex = outer(box.number)
        sizes[vertex] = insides[vertex[1]].size if isinstance(vertex, tuple) else figures[box.number].size
    edges = [(outer(a), outer(b)) for a, b in drawing.edges if outer(a) != outer(b)]
    made = layout(_forward(sizes, edges), edges)
    picture = _Picture()
    corners: dict[int, Point] = {}
    for vertex, (x, y) in made.centres.items():
        if isinstance(vertex, tuple):
            inside = insides[vertex[1]]
            corners[vertex[1]] = (x - inside.size[0] / 2, y - inside.size[1] / 2)
            _draw_inside(picture, inside, corners[vertex[1]], figures)
        else:
            _draw_box(picture, figures[vertex], (x, y))
    for a, b in drawing.edges:
        if outer(a) != outer(b) and (outer(a), outer(b)) in made.routes:
            route = list(made.routes[outer(a), outer(b)])
            if a in frame_of:
                shift = insides[id(frame_of[a])].port(("to", b))
                route[:2] = [(x + shift, y) for x, y in route[:2]]
            if b in frame_of:
                shift = insides[id(frame_of[b])].port(("from", a))
                route[-2:] = [(x + shift, y) for x, y in route[-2:]]
            _draw_edge(picture, a, b, route, arrow=b not in frame_of)
    width, height = made.width + 2 * _MARGIN, made.height + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="the compiled graph" '
        f'width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{-_MARGIN:.0f} {-_MARGIN:.0f} {width:.0f} {height:.0f}">'
        + "".join(picture.edges)
        + "".join(picture.boxes)
        + "</svg>"
    )


def _forward(sizes: dict[Any, Point], edges: list[tuple[Any, Any]]) -> dict[Any, Point]:
    """Vertices so that edges go forward: a frame stands where the last of what it reads has been."""
    order: dict[Any, Point] = {}
    above: dict[Any, list[Any]] = {}
    for a, b in edges:
        above.setdefault(b, []).append(a)
    open_: set[Any] = set()

    def place(vertex: Any) -> None:
        if vertex in order or vertex in open_:
            return
        open_.add(vertex)
        for parent in above.get(vertex, ()):
            place(parent)
        order[vertex] = sizes[vertex]

    for vertex in sizes:
        place(vertex)
    return order


def _draw_inside(picture: _Picture, inside: _Inside, corner: Point, figures: dict[int, _Figure]) -> None:
    x, y = corner
    width, height = inside.size
    frame = inside.frame
    often = f'<tspan class="often">  × {frame.often}</tspan>' if frame.often > 1 else ""
    stack = ""
    if frame.often > 1:  # sheets behind it, as for a pile
        stack = "".join(
            f'<rect class="sheet" x="{x + d:.1f}" y="{y + d:.1f}" width="{width:.1f}" height="{height:.1f}" rx="10"/>'
            for d in (8, 4)
        )
    ground = (
        f'<rect class="frame" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="10"/>'
    )
    picture.edges.insert(0, stack + ground)
    label = f'<text class="title layer" x="{x + 10:.1f}" y="{y + 15:.1f}">{escape(frame.title)}{often}</text>'
    picture.boxes.append(label)
    left, top = x + inside.inset, y + _TITLE / 2
    ports = {*inside.tops, *inside.bottoms}
    for vertex, (cx, cy) in inside.layout.centres.items():
        if vertex not in ports:
            _draw_box(picture, figures[vertex], (left + cx, top + cy))
    for (a, b), route in inside.layout.routes.items():
        points = [(left + px, top + py) for px, py in route]
        if a in ports:
            points[0] = (points[0][0], y)
        if b in ports:
            points[-1] = (points[-1][0], y + height)
        source, target = (vertex[1] if vertex in ports else vertex for vertex in (a, b))
        _draw_edge(picture, source, target, points, arrow=b not in ports)


def _draw_box(picture: _Picture, figure: _Figure, centre: Point) -> None:
    (width, height), box = figure.size, figure.box
    x, y = centre[0] - width / 2, centre[1] - height / 2
    parts = [
        f'<g class="box {box.kind}" data-box="{box.number}">'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6"/>'
    ]
    baseline = y + _PAD / 2
    for index, line in enumerate(figure.lines):
        high = _TITLE if index == 0 else _ROW
        baseline += high
        kind = "title" if index == 0 else "muted" if line.muted else "plain"
        hover = f"<title>{escape(line.hover)}</title>" if line.hover else ""
        target = f'<rect class="hit" x="{x:.1f}" y="{baseline - high + 3:.1f}" width="{width:.1f}" height="{high}"/>'
        text = f'<text class="{kind}" x="{x + _PAD:.1f}" y="{baseline - 2:.1f}">{escape(line.text)}</text>'
        parts.append(f'<g class="row" tabindex="0">{hover}{target}{text}</g>' if hover else text)
    picture.boxes.append("".join(parts) + "</g>")


def _draw_edge(picture: _Picture, source: int, target: int, points: list[Point], *, arrow: bool) -> None:
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for index, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
        if index % 2 == 0:  # through a layer, beside its boxes
            path += f"L{x1:.1f} {y1:.1f}"
        else:
            middle = (y0 + y1) / 2
            path += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    picture.edges.append(f'<path class="edge" data-from="{source}" data-to="{target}" d="{path}"/>')
    if arrow:
        x, y = points[-1]
        head = f"M{x - 3.5:.1f} {y - 7:.1f}L{x:.1f} {y:.1f}L{x + 3.5:.1f} {y - 7:.1f}Z"
        picture.edges.append(f'<path class="head" data-from="{source}" data-to="{target}" d="{head}"/>')


# --- what stands in a box


def _figure(box: Box) -> _Figure:
    lines = list(_lines(box))
    widths = [_width(line.text, _ROW_CHAR) for line in lines[1:]] + [_width(lines[0].text, _TITLE_CHAR)]
    height = _TITLE + _ROW * (len(lines) - 1) + _PAD + (3 if len(lines) > 1 else 0)
    return _Figure(box, lines, (max(widths) + 2 * _PAD, height))


def _lines(box: Box) -> Iterable[_Line]:
    if box.kind == "cluster":
        yield _Line(box.title, "\n\n".join(hover_of(row) for row in box.rows))
        shown = [row for row in box.rows if row.place != "view" and not row.op.endswith("getitem")]
        cut = shown if len(shown) <= _MOST_ROWS else shown[: _MOST_ROWS - 1]
        for row in cut:
            yield _Line(_short(f"{short_op(row.op)}  {_dims(row.result)}"), hover_of(row))
        if len(cut) < len(shown):
            rest = "\n\n".join(hover_of(row) for row in shown[len(cut) :])
            yield _Line(f"+ {len(shown) - len(cut)} more", rest, muted=True)
    elif box.kind == "output":
        yield _Line("output")
        return
    else:
        first = box.rows[0]
        yield _Line(_short(box.title, keep_end=True), hover_of(first))
        yield _Line(_short(_dims(first.result)), hover_of(first))
        module = first.module
        if box.layer is not None:  # the frame around it says the rest
            module = module.partition(f"{box.layer[0]}.{box.layer[1]}.")[2] or module
        if module:
            yield _Line(_short(module, keep_end=True), hover_of(first), muted=True)
    views = [row for row in box.rows[1:] if row.place == "view" or row.op.endswith("getitem")]
    named = list(dict.fromkeys(short_op(row.op) for row in views if not row.op.endswith("getitem")))
    if named:
        yield _Line(_short("as " + ", ".join(named)), "\n\n".join(hover_of(row) for row in views), muted=True)


def hover_of(node: NodeReport) -> str:
    """Return what is said of a node when one points at it."""
    lines = [f"{node.name}: {node.op}", f"gives {node.result}"]
    if node.place != "input":
        lines.append(f"runs as {node.where}")
    if node.module:
        lines.append(f"in {node.module}")
    if node.line:
        lines.append(f"from {short_line(node.line)}")
    if node.reads:
        lines.append("reads " + ", ".join(node.reads))
    return "\n".join(lines)


def _dims(result: str) -> str:
    """``float32[2, 8]`` stays; of several results the first stands for all."""
    if result.startswith("("):
        return result.partition("]")[0].removeprefix("(") + "], …"
    return result


def _short(text: str, *, keep_end: bool = False) -> str:
    if len(text) <= _MOST_CHARS:
        return text
    return "…" + text[1 - _MOST_CHARS :] if keep_end else text[: _MOST_CHARS - 1] + "…"


def _width(text: str, character: float) -> float:
    return len(text) * character
