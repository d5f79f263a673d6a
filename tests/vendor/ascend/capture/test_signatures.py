"""The stand-in of graphs has the signatures of torch_npu's own Python, and the kernels its order of calls."""

import ast
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from dlinfer.vendor.ascend.captured import CapturedLengths
from tests.vendor.ascend.simulated_npu import graphs, streams
from tests.vendor.ascend.vendor_package import environment

FUNCTIONS = [
    ("graphs", "graph_task_group_begin", graphs.graph_task_group_begin),
    ("graphs", "graph_task_group_end", graphs.graph_task_group_end),
    ("graphs", "graph_task_update_begin", graphs.graph_task_update_begin),
    ("graphs", "graph_task_update_end", graphs.graph_task_update_end),
    ("graphs", "NPUGraph.capture_begin", graphs.NPUGraph.capture_begin),
    ("graphs", "NPUGraph.capture_end", graphs.NPUGraph.capture_end),
    ("graphs", "NPUGraph.replay", graphs.NPUGraph.replay),
    ("graphs", "NPUGraph.reset", graphs.NPUGraph.reset),
    ("streams", "ExternalEvent.record", graphs.ExternalEvent.record),
    ("streams", "ExternalEvent.wait", graphs.ExternalEvent.wait),
    ("streams", "ExternalEvent.reset", graphs.ExternalEvent.reset),
    ("streams", "Event.record", streams.Event.record),
    ("streams", "Event.wait", streams.Event.wait),
    ("streams", "Stream.wait_event", streams.Stream.wait_event),
]
ORDER = ("ExternalEvent", "wait", "reset", "graph_task_group_begin", "graph_task_group_end")
UPDATES = ("graph_task_update_begin", "graph_task_update_end", "record")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((environment.folder() / "site" / "torch_npu" / "npu" / f"{module}.py").read_text())


def found(module: str, name: str) -> ast.FunctionDef:
    """A function of the vendor's, or a method."""
    place: Any = tree(module)
    for part in name.split("."):
        place = next(one for one in place.body if getattr(one, "name", None) == part)
    assert isinstance(place, ast.FunctionDef)
    return place


def parameters(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """(name, default as text) of each."""
    names = [one.arg for one in function.args.args]
    defaults = [ast.unparse(one) for one in function.args.defaults]
    return list(zip(names, [""] * (len(names) - len(defaults)) + defaults, strict=True))


def own(function: Callable[..., object]) -> list[tuple[str, str]]:
    shown = inspect.signature(function).parameters.values()
    return [(one.name, "" if one.default is one.empty else repr(one.default)) for one in shown]


def calls(function: ast.AST, wanted: tuple[str, ...]) -> list[str]:
    """Which of some functions are called, in the order of the text."""
    nodes = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
    places = [(one.lineno, one.func.attr if isinstance(one.func, ast.Attribute) else getattr(one.func, "id", ""))
              for one in nodes]  # fmt: skip
    return [name for _, name in sorted(places) if name in wanted]


@pytest.mark.parametrize(("module", "name", "stand_in"), FUNCTIONS, ids=[one[1] for one in FUNCTIONS])
def test_signatures_are_the_vendor_s(module, name, stand_in):
    if reason := environment.missing():
        pytest.skip(reason)
    assert own(stand_in) == parameters(found(module, name))


def test_the_order_of_calls_is_the_vendor_s():
    if reason := environment.missing():
        pytest.skip(reason)
    ours = ast.parse(inspect.getsource(CapturedLengths))
    methods = {one.name: one for one in ast.walk(ours) if isinstance(one, ast.FunctionDef)}
    captures = calls(found("graphs", "_GraphDispatchMode.__torch_dispatch__"), ORDER)
    updates = calls(found("graphs", "_GraphDispatchMode.update_capture_record"), UPDATES)
    assert tuple(captures) == ORDER and tuple(updates) == UPDATES  # else the vendor has another order now
    assert calls(methods["run"], ORDER) == captures
    assert calls(methods["update"], UPDATES)[:3] == updates
