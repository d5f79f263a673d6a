"""Interfaces on their way through JSON: everything comes back as it was, or is refused."""

import copy
import json

import pytest
import torch

from dlinfer.graph.codec.arguments import CodecError
from dlinfer.graph.codec.interface import read_interface, write_interface
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port, Range, bounds_of
from dlinfer.graph.torch_private.expressions import parse_condition, parse_size

SYMBOLS: dict[str, Range] = {"s0": (1, 16), "s1": (0, None)}
CPU = torch.device("cpu")


def port(name: str, *sizes: str | int | None, **fields) -> Port:
    parsed = tuple(None if size is None else parse_size(size) for size in sizes)
    return Port(name, fields.pop("dtype", torch.float32), parsed, bounds_of(parsed, SYMBOLS), CPU, **fields)


INTERFACE = Interface(
    (
        port("x", "s0", 8),
        port("state[0].keys", "s1", "2 * s0", strides=(parse_size("2 * s0"), parse_size(1)), held=True),
        port("count", "s1", dtype=torch.int64, number=True),
        port("z", 3, None, offset=4, resolved=True, dtype=torch.complex64),
    ),
    (port("y", "s0 * s1", None, dtype=torch.bfloat16),),
    SYMBOLS,
    (parse_condition("s0 <= s1"),),
    {1: None, 3: float("-inf"), 4: "mean"},
    {"s0": 5},
)


def test_an_interface_comes_back():
    data = json.loads(json.dumps(write_interface(INTERFACE), allow_nan=False))
    assert read_interface(data) == INTERFACE


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data.pop("symbols"), "symbols"),
        (
            lambda data: data["symbols"].append({"name": "s2", "low": 0, "high": None, "hint": None}),
            "no input has the size s2",
        ),
        (lambda data: data["symbols"][0].update(low=17), "has the range 17"),
        (lambda data: data["symbols"][0].update(hint=True), "are not integers"),
        (lambda data: data["conditions"].append("s0"), "no comparison"),
        (lambda data: data["conditions"].append("s0 < s9"), "unknown size: s0 < s9"),
        (lambda data: data["inputs"][0].update(sizes=["__import__('os')"]), "unknown characters"),
        (lambda data: data["inputs"][0].update(sizes=["s9"]), "s9"),
        (lambda data: data["inputs"][0].update(dtype="load"), "not a dtype"),
        (lambda data: data["inputs"][0].update(device="nowhere"), "not a device"),
        (lambda data: data["inputs"][1].update(strides=[[]]), "is not text"),
        (lambda data: data["inputs"][3].update(offset=True), "its offset is not an integer"),
        (lambda data: data["outputs"][0].update(name=None), "its offset is not an integer"),
        (lambda data: data["constants"].append([7.5, None]), "a constant has a place that no input has"),
        (lambda data: data["constants"].append([2, {"node": "x"}]), "unknown kind"),
    ],
)
def test_damaged_data_is_refused(damage, why):
    data = copy.deepcopy(json.loads(json.dumps(write_interface(INTERFACE))))
    damage(data)
    with pytest.raises(CodecError, match=why):
        read_interface(data)
