"""Programs: what they call with what, what they forget when, and what they say when a step fails."""

import operator
import pickle
import weakref

import pytest
import torch

from dlinfer.errors import CaptureError, GraphRunError, OpArgumentError, OpCallError
from dlinfer.graph.ir.program import Constant, Program, Step, Value, refer, refusal_in, values_in


def program(steps, output, inputs=("x",), constants=None, functions=None, name="region_3") -> Program:
    table = {"mul": operator.mul, "add": operator.add, **(functions or {})}
    return Program(name, inputs, steps, output, table.__getitem__, constants or {})


def step(results, callee, *args, line="model.py:7, in forward", **kwargs) -> Step:
    return Step(results, "kernel", callee, args, kwargs, line)


def test_steps_in_order_with_values_and_fixed_arguments():
    run = program(
        [step("a", "mul", Value("x"), 3), step("b", "add", Value("a"), Value("x"))], (Value("b"), Value("a"))
    )
    assert run(5) == (20, 15)
    assert run.counts() == {"kernel": 2}


def test_every_form_of_argument_reaches_the_callee_as_it_was():
    given = []

    def keep(*args, **kwargs):
        given.append((args, kwargs))

    constant, device = torch.ones(2), torch.device("cpu")
    args = (
        [Value("x"), None, True],
        (Value("x"),),
        (),
        {"k": Value("x"), "l": [1]},
        slice(Value("x"), None, 2),
        float("inf"),
        -0.0,
        'it\'s "quoted"\n',
        torch.float16,
        device,
        1 << 70,
        Constant("weights.0.packed"),
        Ellipsis,
    )
    run = program(
        [step("a", "keep", *args, flag=Value("x"))],
        (),
        constants={"weights.0.packed": constant},
        functions={"keep": keep},
    )
    assert run(7) == ()
    ((seen, named),) = given
    assert seen[:5] == ([7, None, True], (7,), (), {"k": 7, "l": [1]}, slice(7, None, 2))
    assert repr(seen[5:7]) == "(inf, -0.0)"
    assert seen[7:11] == ('it\'s "quoted"\n', torch.float16, device, 1 << 70)
    assert seen[11] is constant
    assert seen[12] is Ellipsis
    assert named == {"flag": 7}


def test_constants_whose_names_are_no_identifiers_or_alike():
    constants = {"a.b": torch.tensor(1), "a_b": torch.tensor(2), "0-x y": torch.tensor(3)}
    run = program([], tuple(map(Constant, constants)), constants=constants)
    assert [int(value) for value in run(0)] == [1, 2, 3]


def test_steps_with_several_values_and_with_none():
    seen = []
    run = program(
        [step(("a", "b"), "pair", Value("x")), step((), "note", Value("a")), step(("c",), "one", Value("b"))],
        [Value("b"), None, {"deep": Value("c")}],
        functions={
            "pair": lambda x: (x, x + 1),
            "note": lambda a: (seen.append(a), ())[1],
            "one": lambda b: (b * 2,),
        },
    )
    assert run(1) == [2, None, {"deep": 4}]
    assert seen == [1]


def test_values_are_forgotten_after_their_last_use():
    alive: list[weakref.ref] = []
    counts = []

    def make(_):
        counts.append(sum(ref() is not None for ref in alive))
        made = torch.ones(1)
        alive.append(weakref.ref(made))
        return made

    chain = [step("v0", "make", Value("x"))] + [
        step(f"v{n}", "make", Value(f"v{n - 1}")) for n in range(1, 6)
    ]
    unused = [step("u", "make", None)]
    last = [step("w", "make", None)]
    run = program(unused + chain + last, (Value("v5"),), functions={"make": make})
    (result,) = run(0)
    assert max(counts) <= 1, "only the argument of a step is alive while it runs"
    assert alive[6]() is result
    assert sum(ref() is not None for ref in alive) == 1


def fails(_):
    raise ValueError("no such row\nmore of it")


def test_an_error_names_region_node_op_and_line_and_the_program_stays_usable():
    broken = [True]
    run = program(
        [
            step("a", "mul", Value("x"), 2),
            step(("b", "c"), "maybe", Value("a"), line="model.py:9, in attention"),
        ],
        (Value("b"),),
        functions={"maybe": lambda a: fails(a) if broken[0] else (a, a)},
    )
    for _ in range(2):
        with pytest.raises(GraphRunError) as caught:
            run(4)
        error = caught.value
        assert isinstance(error.__cause__, ValueError)
        for part in ("region_3", "'b, c'", "(maybe)", "model.py:9, in attention", "ValueError: no such row."):
            assert part in str(error)
    broken[0] = False
    assert run(4) == (8,)


def test_an_error_in_a_nested_region_is_told_once():
    inner = program(
        [step("b", "fails", Value("x"), line="model.py:3, in mlp")], (Value("b"),), functions={"fails": fails}
    )
    outer = program(
        [step(("r",), "region", Value("x"))], (Value("r"),), functions={"region": inner}, name="graph"
    )
    with pytest.raises(
        GraphRunError, match=r"^region_3 failed at node 'b' \(fails\), from model.py:3, in mlp"
    ):
        outer(1)


class Custom(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class Named(KeyError):
    """Another name of a plain one."""


def _fails_with(error: Exception):
    def fails(_):
        raise error

    inner = program(
        [step("b", "fails", Value("x"), line="model.py:3, in mlp")], (Value("b"),), functions={"fails": fails}
    )
    return program(
        [step(("r",), "region", Value("x"))], (Value("r"),), functions={"region": inner}, name="graph"
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (IndexError("row 7"), IndexError),
        (KeyError("row"), KeyError),
        (NotImplementedError("later"), NotImplementedError),
        (ZeroDivisionError("by 0"), ZeroDivisionError),
        (Named("row"), Named),
        (RuntimeError("embedding: index out of range in self: 7 of 3 rows"), IndexError),
        (RuntimeError("index 5 is out of bounds for dimension 0 with size 3"), IndexError),
        (ValueError("index 5 is out of range"), ValueError),
        (Named("index 5 is out of range"), Named),
        (torch.linalg.LinAlgError("singular"), torch.linalg.LinAlgError),
    ],
    ids=repr,
)
def test_an_error_is_also_of_the_class_that_eager_raises(error, kind):
    with pytest.raises(kind) as caught:
        _fails_with(error)(1)
    raised = caught.value
    assert isinstance(raised, GraphRunError) and raised.__cause__ is error
    assert "model.py:3, in mlp" in str(raised) and str(raised).startswith("region_3 failed")
    again = pickle.loads(pickle.dumps(raised))
    assert (type(again), str(again)) == (type(raised), str(raised))


def test_an_error_of_a_class_with_fields_of_its_own_is_raised_as_it_is_with_a_note():
    error = Custom(7)
    with pytest.raises(Custom) as caught:
        _fails_with(error)(1)
    assert caught.value is error and caught.value.code == 7
    (note,) = error.__notes__
    assert note.startswith("region_3 failed at node 'b' (fails), from model.py:3, in mlp")


def test_nested_regions_give_their_values():
    inner = program([step("b", "add", Value("x"), 1)], (Value("b"), Value("x")))
    outer = program(
        [step(("p", "q"), "region", Value("x")), step("s", "mul", Value("p"), Value("q"))],
        (Value("s"),),
        functions={"region": inner},
    )
    assert outer(3) == (12,)


def test_our_own_errors_and_interruptions_pass_as_they_are():
    def refuses(_):
        raise CaptureError(reason="it is late", line="here")

    def stops(_):
        raise KeyboardInterrupt

    for function, kind in ((refuses, CaptureError), (stops, KeyboardInterrupt)):
        with pytest.raises(kind):
            program([step("a", "f", Value("x"))], (), functions={"f": function})(1)


def test_a_wrong_number_of_inputs_is_no_fault_of_a_node():
    with pytest.raises(TypeError):
        program([step("a", "mul", Value("x"), 2)], (Value("a"),))(1, 2)


def test_a_symbolic_number_without_a_node_is_refused():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    symbol = ShapeEnv().create_unbacked_symint()
    with pytest.raises(TypeError, match="no node computes it"):
        program([step("a", "mul", Value("x"), symbol)], (Value("a"),))


def test_references_of_a_nodes_arguments():
    graph = torch.fx.Graph()
    x, c = graph.placeholder("x"), graph.get_attr("c")
    assert refer(([x, 1], {"k": (c,)}, slice(x, None, 2))) == (
        [Value("x"), 1],
        {"k": (Constant("c"),)},
        slice(Value("x"), None, 2),
    )
    assert list(values_in([Value("a"), {"k": (Value("b"),)}, slice(None, Value("c")), 3])) == ["a", "b", "c"]


def test_an_error_that_a_kernel_in_cpp_says_is_the_same_error() -> None:
    error = OpArgumentError(op="fused_moe", argument="topk_ids", expected="ids of 0..7", given="ids of -1..9")
    for text in (str(error), f"step 3: check_ids, routing.h:70, {error}\nException raised from run\nframe 0"):
        found = refusal_in(text)
        assert found is not None and found.fields == error.fields and str(found) == str(error)
    for text in ("", "fused_moe: one dtype", str(OpCallError(op="a", schema="b", detail="c"))):
        assert refusal_in(text) is None
