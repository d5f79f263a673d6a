"""Programs on their way through JSON: everything comes back as it was, or is refused by name."""

import json
import math

import pytest
import torch

from dlinfer.graph.codec.arguments import CodecError
from dlinfer.graph.codec.program import read_program, write_program
from dlinfer.graph.ir import callee
from dlinfer.graph.ir.program import Constant, Program, Step, Value


def through_json(program: Program) -> Program:
    return read_program(json.loads(json.dumps(write_program(program), allow_nan=False)), program.resolve)


def returned(argument, constants=None):
    """An argument of a step after a way through JSON text."""
    one = Program(
        "p", ["x"], [Step("a", "kernel", "f", (argument,), {"k": argument}, "m.py:1")], (Value("a"), argument),
        lambda reference: lambda *args, **kwargs: None, constants or {"c": torch.ones(1)},
    )  # fmt: skip
    again = through_json(one)
    (step,) = again.steps
    assert (again.name, again.inputs) == ("p", ["x"])
    assert (step.results, step.kind, step.callee, step.line) == ("a", "kernel", "f", "m.py:1")
    assert repr(step.kwargs["k"]) == repr(step.args[0]) == repr(again.output[1])
    return step.args[0]


@pytest.mark.parametrize(
    "argument",
    [
        None, True, False, 0, -3, 1 << 70, 0.1, 1.0, -0.0, 5e-324, 1e308, "text ä \"'\n", "",
        [], (), [1, (2, [None])], (Value("x"), [Constant("c")]), slice(None, None, None), slice(Value("x"), -1, 2),
        float("inf"), -float("inf"),
        torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.strided,
        torch.contiguous_format, torch.preserve_format, torch.device("cpu"), torch.device("cuda:1"),
    ],
    ids=repr,
)  # fmt: skip
def test_arguments_come_back(argument):
    back = returned(argument)
    assert type(back) is type(argument)
    assert repr(back) == repr(argument)


def test_nan_comes_back():
    assert math.isnan(returned(float("nan")))


@pytest.mark.parametrize(
    "argument",
    [torch.Generator(), 1j, {"a": 1}, {1, 2}, object(), torch.ones(2), [torch.Generator()]],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_place_in_a_file_is_refused_by_its_type(argument):
    kind = type(argument[0] if isinstance(argument, list) else argument).__name__
    with pytest.raises(CodecError, match=kind):
        returned(argument)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
@pytest.mark.parametrize("sizes", [(), (3,), (2, 3), (0, 4)])
def test_constants_come_back(dtype, sizes):
    value = (torch.arange(torch.Size(sizes).numel()).reshape(sizes) % 3 - 1).to(dtype)
    one = Program("p", [], [], (Constant("c.d"),), callee.resolve, {"c.d": value})
    (back,) = through_json(one)()
    assert back.dtype == dtype
    assert torch.equal(back, value)
    back.fill_(0)  # it is writable memory of its own


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1 << 18 | 1),
        torch.ones(2, 3).t(),
        torch.ones(1).expand(4),
        torch.eye(2).to_sparse(),
        torch.nn.Linear(1, 1),
    ],
    ids=["large", "transposed", "expanded", "sparse", "a module"],
)
def test_constants_that_cannot_be_stored(value):
    with pytest.raises(CodecError, match="a constant"):
        write_program(Program("p", [], [], (), callee.resolve, {"c": value}))


def test_parameters_are_stored_without_their_gradient():
    value = torch.nn.Parameter(torch.ones(2))
    again = through_json(Program("p", [], [], (), callee.resolve, {"c": value}))
    assert not again.constants["c"].requires_grad


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("steps"),
        lambda data: data["steps"][0].pop("callee"),
        lambda data: data["steps"][0].update(args=[{"unknown": 1}]),
        lambda data: data["steps"][0].update(args=[{}]),
        lambda data: data["steps"][0].update(args=[{"torch": "ones"}]),
        lambda data: data["constants"].update(c={"dtype": "float32", "shape": [3], "bytes": "AAAA"}),
        lambda data: data["constants"].update(c={"dtype": "float32", "shape": [3], "bytes": "%%"}),
    ],
)
def test_damaged_data_is_refused(damage):
    data = write_program(
        Program(
            "p",
            ["x"],
            [Step("a", "k", "py operator.neg", (Value("x"),), {}, "")],
            (Value("a"),),
            callee.resolve,
        )
    )
    damage(data)
    with pytest.raises(CodecError):
        read_program(data, callee.resolve)


def test_a_stored_program_runs():
    ops = [
        Step("a", "kernel", "op aten.mul.Tensor", (Value("x"), 2.0), {}, ""),
        Step("b", "view", "op aten.slice.Tensor", (Value("a"), 0, 1, 9223372036854775807), {}, ""),
        Step("n", "size", "op aten.sym_size.int", (Value("b"), 0), {}, ""),
        Step("m", "size", "py operator.mul", (Value("n"), 3), {}, ""),
        Step(
            "c", "kernel", "op aten.full.default", ([Value("m")], float("-inf")), {"dtype": torch.float64}, ""
        ),
    ]
    one = Program("p", ["x"], ops, (Value("b"), Value("c")), callee.resolve)
    again = through_json(one)
    x = torch.ones(3, 2)
    torch.testing.assert_close(again(x), one(x))
    torch.testing.assert_close(again(x), (x[1:] * 2, torch.full((6,), float("-inf"), dtype=torch.float64)))
