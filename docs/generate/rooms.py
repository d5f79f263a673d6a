"""The figure of the rooms, docs/internals/rooms.svg, drawn from the package's own imports: ``make figures`` writes it.

An arrow leads from a room to a room that it imports. An import that follows a chain of other arrows is left out. Big
rooms lie in bands, the lowest at the bottom, and the rooms of ``graph`` in columns, the lowest at the left. They are
read from the code, as arrows are; only where a room of ``graph`` stands is written down here, in ``PLACES``.
"""

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from tests.architecture.imports import PACKAGE, REPOSITORY, import_graph, within
from tests.architecture.rooms import AUTOLOAD, ROOMS, room

FIGURE = REPOSITORY / "docs" / "internals" / "rooms.svg"
WIDTH, MARGIN, GAP, INDENT = 1040, 20, 26, 124
CELL, LANE = (96, 26), 41  # a room of graph: width and height; from row to row

# Bands from the top: the big room, what it is about, and the height of its box.
BANDS = (
    ("cli", "the command dlinfer", 34),
    ("serve", "HOW MANY: servers of one model behind a router", 34),
    ("embedding", "texts to vectors and scores, and their server", 34),
    ("explanation", "what was compiled: dlinfer.explain", 34),
    ("conformance", "whether a vendor is right: every op, through every check", 34),
    ("framework", "FOR WHOM: adaptors into serving frameworks", 58),
    ("vendor.*", "WHO answers: kernels and graph engines, one folder a vendor", 58),
    ("runtime", "what was compiled, away from the compiler", 58),
    ("graph", "HOW a model becomes a compiled graph", 200),
    ("ops", "WHAT can be asked: the fused-op interface", 34),
)
# Below the bands, from the right: what everything stands on.
FLOOR = ("vendor", "toolchain", "settings", "errors", "utils")
FLOOR_WORDS = {"vendor": "vendor: base, discovery"}
# Rooms of graph: (column, row).
PLACES = {
    "torch_private": (0, 2),
    "ir": (1, 2),
    "passes": (2, 1),
    "interface": (2, 2),
    "capture": (2, 3),
    "functional": (3, 0),
    "options": (3, 1),
    "report": (3, 2),
    "onnx": (4, 0),
    "engine": (4, 1),
    "cache": (5, 1),
    "codec": (4, 3),
    "debug": (2, 0),
    "engine_kit": (7, 0),
    "selftest": (6, 1),
    "lowering": (5, 2),
    "observe": (6, 2),
    "backend": (7, 2),
    "bound_call": (8, 1),
}
STYLE = """
  .page { fill: #ffffff } .band { fill: #f3f5f8; stroke: #8a94a3 } .room { fill: #ffffff; stroke: #4a6fa5 }
  text { font: 12px system-ui, sans-serif; fill: #1f2933 } .name { font-weight: 600; font-size: 14px }
  .words { fill: #52606d } .arrow { fill: none; stroke: #7b8794; stroke-width: 1.4 } .head { fill: #7b8794 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181d } .band { fill: #1d232b; stroke: #5c6773 } .room { fill: #262e38; stroke: #7fa7e0 }
    text { fill: #e4e9ef } .words { fill: #a9b4c0 } .arrow { stroke: #94a0ad } .head { fill: #94a0ad }
  }
"""
Arrows = set[tuple[str, str]]
Box = tuple[float, float, float, float]  # x, y, width, height


def arrows(part: str = "") -> Arrows:
    """The arrows between the rooms of ``part``, or between the big rooms, without those that follow from others."""
    found = set()
    for name, targets in import_graph(REPOSITORY).items():
        pair = ((_named(name, part), _named(target, part)) for target in targets if name != AUTOLOAD)
        found |= {(one, other) for one, other in pair if one and other and one != other}
    return {(one, other) for one, other in found if not _follows(one, other, found)}


def _named(module: str, part: str) -> str:
    """The room of a module as the figure calls it: inside ``part``, or the big room; "" where it has no place."""
    name = room(module).removeprefix("dlinfer").removeprefix(".")
    if part:
        return name.removeprefix(f"{part}.") if name.startswith(f"{part}.") else ""
    return name if name == "vendor.*" else name.split(".")[0].replace("__main__", "cli")


def _follows(one: str, other: str, found: Arrows) -> bool:
    """Whether ``one`` reaches ``other`` through a third room."""
    seen: set[str] = set()
    todo = [target for source, target in found if source == one and target != other]
    while todo:
        name = todo.pop()
        seen.add(name)
        todo += [target for source, target in found if source == name and target not in seen]
    return other in seen


def _inner(name: str) -> list[str]:
    """What a band shows of its room: the rooms right below it, else the folders in it."""
    below = [one.split(".")[2] for one in ROOMS if one.startswith(f"dlinfer.{name}.")]
    folders = sorted((PACKAGE / name.removesuffix(".*")).glob("*/__init__.py"))
    return list(dict.fromkeys(below)) or [one.parent.name for one in folders]


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def _box(box: Box, kind: str) -> str:
    x, y, width, height = box
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>'


def _arrow(x0: float, y0: float, x1: float, y1: float, head: bool = True) -> str:
    """A straight line down, or a curve that leaves and arrives level."""
    middle = (x0 + x1) / 2
    line = f"L{x1:g} {y1:g}" if x0 == x1 else f"C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}"
    end = ' marker-end="url(#head)"' if head else ""
    return f'<path d="M{x0:g} {y0:g}{line}" class="arrow"{end}/>'


def _graph(top: float) -> Iterable[str]:
    """The rooms of graph and the arrows between them."""
    step = (WIDTH - 2 * MARGIN - 2 * 12 - CELL[0]) / max(column for column, _ in PLACES.values())
    boxes = {
        name: (MARGIN + 12 + column * step, top + 34 + row * LANE, *CELL)
        for name, (column, row) in PLACES.items()
    }
    for one, other in sorted(arrows("graph")):
        (x0, y0, *_), (x1, y1, *_) = boxes[one], boxes[other]
        if PLACES[one][0] - PLACES[other][0] > 1 and y0 != y1:  # along the row of the other, which is free
            x0 += CELL[0] / 3
            yield _arrow(x0, y0 + CELL[1], x0 - 60, y1 + CELL[1] / 2, head=False)
            x0, y0 = x0 - 60, y1
        yield _arrow(x0, y0 + CELL[1] / 2, x1 + CELL[0] + 7, y1 + CELL[1] / 2)
    for name, box in boxes.items():
        yield _box(box, "room")
        yield _text(box[0] + CELL[0] / 2, box[1] + 17, name.replace("_", " "))


def _bands() -> Iterable[str]:
    """The big rooms from the top, with their folders."""
    y = MARGIN
    for name, words, height in BANDS:
        yield _box((MARGIN, y, WIDTH - 2 * MARGIN, height), "band")
        yield _text(MARGIN + 12, y + 22, name.removesuffix(".*"), "name", "start")
        yield _text(MARGIN + INDENT, y + 22, words, "words", "start")
        if name == "graph":
            yield from _graph(y)
        elif height > 40:
            inner = _inner(name)
            step = min(126.0, (WIDTH - 2 * MARGIN - INDENT) / len(inner))
            for place, label in enumerate(inner):
                x = MARGIN + INDENT + place * step
                yield _box((x, y + 30, step - 10, 22), "room")
                yield _text(x + step / 2 - 5, y + 45, label)
        y += height + GAP
    for name, (x, y, width) in _floor().items():
        yield _box((x, y, width, 34), "band")
        yield _text(x + width / 2, y + 22, FLOOR_WORDS.get(name, name))


def _floor() -> dict[str, tuple[float, float, float]]:
    """Where what everything stands on lies: x, y, width."""
    y = MARGIN + sum(height + GAP for *_, height in BANDS)
    width = (WIDTH - 2 * MARGIN - 4 * GAP) / len(FLOOR)
    return {name: (MARGIN + (len(FLOOR) - 1 - at) * (width + GAP), y, width) for at, name in enumerate(FLOOR)}


def _between() -> Iterable[str]:
    """The arrows between big rooms. The bands are drawn over those that pass behind them, each in a lane of its own."""
    floor = _floor()
    order = [name for name, *_ in BANDS]
    tops = {}
    y = MARGIN
    for name, _, height in BANDS:
        tops[name] = (y, y + height)
        y += height + GAP
    lane = 0
    for one, other in sorted(arrows()):
        if one in floor and other in floor:
            (x0, y0, _), (x1, _, width) = floor[one], floor[other]
            yield _arrow(x0, y0 + 17, x1 + width + 7, y0 + 17)
        elif other in floor:
            x, top, width = floor[other]
            yield _arrow(x + width / 2, tops[one][1], x + width / 2, top - 7)
        else:
            lane += order.index(other) - order.index(one) > 1
            x = MARGIN + 50 + (30 * lane if order.index(other) - order.index(one) > 1 else 0)
            yield _arrow(x, tops[one][1], x, tops[other][0] - 7)


def drawn() -> str:
    """The SVG. Raises KeyError for a room that has no place in it yet."""
    for name in {_named(one, "graph") for one in ROOMS if within(one, "dlinfer.graph")}:
        PLACES[name]
    body = "\n".join([*_between(), *_bands()])
    height = MARGIN + sum(height + GAP for *_, height in BANDS) + 34 + GAP + MARGIN
    legend = (
        "An arrow: the room imports the other. Some pass behind a room; imports along a chain are left out."
    )
    body += "\n" + _text(MARGIN, height - MARGIN, legend, "words", "start")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="The rooms of dlinfer and what each imports">\n<style>{STYLE}</style>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8Z" class="head"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{height}" class="page"/>\n{body}\n</svg>\n'
    )


def main(path: Path = FIGURE) -> None:
    path.write_text(drawn())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
