"""Arrows between rooms run as docs/internals/architecture.md says, and no import closes a circle."""

import sys
from pathlib import Path

import pytest

from tests.architecture.imports import REPOSITORY, circles, import_graph, imports, modules, within
from tests.architecture.rooms import (
    AUTOLOAD,
    AUTOLOAD_REACHES,
    HALLS,
    ROOMS,
    THIRD_PARTY,
    allowed,
    room,
)


def violations(root: Path) -> list[str]:
    """Every import that runs against the arrows, as "module:line imports target: why"."""
    known = modules(root)
    found = []
    for name, path in known.items():
        for line, target in imports(name, path, known):
            why = _against_arrows(name, target) if within(target, "dlinfer") else _foreign(name, target)
            if why:
                found.append(f"{name}:{line} imports {target}: {why}")
    return found


def _against_arrows(name: str, target: str) -> str:
    if name == AUTOLOAD:
        reached = any(within(target, one) for one in AUTOLOAD_REACHES)
        return "" if reached else "the autoload hook reaches its adaptor only"
    if target == AUTOLOAD:
        return "" if within(name, "dlinfer.framework") else "the autoload hook belongs to the adaptors"
    if target in HALLS or name in HALLS:
        return "a hall imports nothing and nobody imports it: name the room"
    if room(name) == room(target) == "dlinfer.vendor.*" and name.split(".")[2] != target.split(".")[2]:
        return "one vendor never imports another"
    return (
        "" if room(target) in allowed(room(name)) else f"no arrow leads from {room(name)} to {room(target)}"
    )


def _foreign(name: str, target: str) -> str:
    package = target.partition(".")[0]
    listed = next(names for prefix, names in THIRD_PARTY.items() if within(name, prefix))
    return "" if package in sys.stdlib_module_names or package in listed else "not a package of this room"


def test_imports_follow_the_arrows():
    assert violations(REPOSITORY) == []


def test_every_arrow_points_down():
    for name in ROOMS:
        above = {other for other in allowed(name) if ROOMS.index(other) > ROOMS.index(name)}
        assert above == set(), name


def test_every_arrow_is_used():
    graph = import_graph(REPOSITORY)
    used = {
        (room(name), room(target))
        for name, targets in graph.items()
        for target in targets
        if name != AUTOLOAD
    }
    unused = [
        f"{name} -> {other}"
        for name in ROOMS
        if name not in ("dlinfer.vendor.*", "dlinfer.cli")  # halls stand for all their rooms
        for other in allowed(name) - {name}
        if (name, other) not in used
    ]
    assert unused == []


def test_no_import_closes_a_circle():
    assert circles(import_graph(REPOSITORY)) == []


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert circles(graph) == [["a", "b", "c"], ["f", "g"]]


@pytest.mark.parametrize(
    ("module", "line", "why"),
    [
        ("dlinfer.errors", "from dlinfer import settings", "no arrow"),
        ("dlinfer.settings", "import torch", "not a package of this room"),
        ("dlinfer.vendor.base", "import dlinfer.ops", "no arrow"),
        ("dlinfer.ops.norm.rms_norm", "from dlinfer.vendor.cpu import VENDOR", "no arrow"),
        ("dlinfer.ops.norm.rms_norm", "from ....graph import backend", "no arrow"),
        ("dlinfer.graph.backend", "def f():\n    from dlinfer.vendor import cpu", "no arrow"),
        ("dlinfer.vendor.cpu", "import dlinfer.vendor.reference", "one vendor never"),
        ("dlinfer.vendor.cpu", "from .. import reference", "one vendor never"),
        ("dlinfer.vendor.cpu", "import openvino", "not a package of this room"),
        ("dlinfer.vendor.cpu", "from dlinfer.framework import patching", "no arrow"),
        ("dlinfer.framework.patching", "import lmdeploy.messages", "not a package of this room"),
        ("dlinfer.ops.norm.rms_norm", "from lmdeploy import utils", "not a package of this room"),
        ("dlinfer.framework", "import dlinfer.cli", "no arrow"),
        ("dlinfer.framework.lmdeploy_ext.device", "from ..layers import rotary", "no arrow"),
        ("dlinfer._autoload", "from dlinfer import errors", "reaches its adaptor only"),
        ("dlinfer._autoload", "import torch", "not a package of this room"),
    ],
)
def test_the_reader_of_imports_sees(tmp_path, module, line, why):
    tree = (
        "vendor.cpu",
        "vendor.reference",
        "vendor.base",
        "ops.norm",
        "graph.backend",
        "framework.patching",
        "framework.lmdeploy_ext.device",
        "framework.lmdeploy_ext.layers",
    )
    for name in ("dlinfer.errors", "dlinfer.settings", *(f"dlinfer.{part}" for part in tree)):
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        for parent in folder.relative_to(tmp_path).parents[:-1]:
            (tmp_path / parent / "__init__.py").touch()
    guilty = tmp_path.joinpath(*module.split("."))
    guilty.mkdir(exist_ok=True)
    (guilty / "__init__.py").write_text(line)
    assert len(violations(tmp_path)) == 1
    assert why in violations(tmp_path)[0]
