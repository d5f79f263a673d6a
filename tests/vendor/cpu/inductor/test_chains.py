"""Chains of steps: the same results as step by step, in one call, for whatever a step may be given."""

import gc
import operator
import sys
import threading
import time

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dlinfer.errors import GraphRunError
from dlinfer.graph.ir.layout import LAYOUT
from dlinfer.graph.ir.program import Constant, Joined, Program, Step, Value
from dlinfer.utils import computing
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor import chains, kernels
from tests.vendor.cpu.test_native import UNKNOWN

H = 64
weights = {name: torch.randn(H, H).bfloat16() * 0.1 for name in "abc"}


@pytest.fixture(autouse=True)
def _library():
    reason = native.why_not()
    if reason is not None:
        pytest.skip(reason)


def step(results, callee, *args, **kwargs) -> Step:
    return Step(results, "kernel", callee, args, kwargs, f"model.py, {results}")


def view(name, op, *args) -> Step:
    return step(name, f"op aten.{op}", *args)


def linear(name, x, weight, bias=None) -> Step:
    return step(name, "native linear", Value(x), Constant(weight), bias)


def item(name, source, index) -> Step:
    return step(name, "py operator.getitem", Value(source), index)


def programs(steps, output, inputs=("x",), constants=weights, functions=None):
    """(step by step, with chains)."""

    def resolve(callee):
        return functions[callee] if functions and callee in functions else kernels.resolve(callee)

    return [
        Program("region_0", inputs, steps, output, resolve, constants, join) for join in (None, chains.join)
    ]


def joined(program) -> list[int]:
    """The lengths of a program's chains."""
    return [len(line.parts) for line in program._lines if isinstance(line, Joined)]


def assert_same(steps, output, *given, inputs=("x",), lengths, **kwargs):
    plain, chained = programs(steps, output, inputs, **kwargs)
    assert joined(plain) == [] and joined(chained) == lengths
    wanted, got = plain(*given), chained(*given)
    assert len(wanted) == len(got)
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one, other)
        assert one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 0, 1), (0, 1, 2)])
def test_layouts(order):
    """Dense in an order of dimensions: a copy where the result lies otherwise, and the result itself where not."""
    steps = [
        view("a", "transpose.int", Value("x"), 1, 2),
        step("b", LAYOUT, Value("a"), order),
        view("c", "unsqueeze.default", Value("b"), 0),
    ]
    assert_same(steps, (Value("b"), Value("c")), x_of(2, 5, H), lengths=[5])  # three for a layout


def x_of(*shape):
    return torch.randn(*shape).bfloat16()


def block(x):
    """Norms, products of one and of several weights, a gate: sequences of results among them."""
    return [
        step("n", "native rms_norm", Value(x), Constant("norm"), 1e-6),
        step("l", "native linears", Value("n"), [Constant("a"), Constant("b")], [None, Constant("norm")]),
        item("q", "l", 0),
        step("s", "native silu_and_mul", Value("q")),
        item("k", "l", 1),
        view("h", "split_with_sizes.default", Value("k"), [H // 2, H // 2], -1),
        item("k0", "h", 0),
        item("k1", "h", -1),
        step("p", "native add_rms_norm", Value("k0"), Value("s"), Constant("half"), 1e-5),
        item("r", "p", 1),
        step("r", LAYOUT, Value("r"), None),
        item("o", "p", 0),
    ]


constants = weights | {"norm": torch.rand(H).bfloat16(), "half": torch.rand(H // 2).bfloat16()}


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_a_block_is_one_call(tokens):
    x = x_of(2, tokens, H)
    assert_same(block("x"), (Value("o"), Value("r"), Value("k1")), x, constants=constants, lengths=[6])


@pytest.mark.parametrize("tokens", [1, 5])
def test_views_of_every_kind(tokens):
    steps = [
        view("a", "flatten.using_ints", Value("x"), 0, -2),
        view("b", "unflatten.int", Value("a"), -1, [4, -1]),
        view("c", "transpose.int", Value("b"), 0, 1),
        view("d", "reshape.default", Value("c"), [Value("n"), -1]),
        view("e", "unsqueeze.default", Value("d"), 0),
        view("f", "expand.default", Value("e"), [3, -1, Value("n2")]),
        view("g", "select.int", Value("f"), 0, 1),
        view("h", "permute.default", Value("g"), [1, 0]),
        step("i", LAYOUT, Value("h"), None),
        view("j", "view.default", Value("i"), [1, -1]),
        view("k", "squeeze.dim", Value("j"), 0),
    ]
    x = x_of(2, tokens, H)
    sizes = (4, 2 * tokens * H // 4)
    output = (Value("c"), Value("h"), Value("k"))
    assert_same(steps, output, x, *sizes, inputs=("x", "n", "n2"), lengths=[11])


def test_what_a_chain_does_not_take_stays_between_chains():
    steps = [
        linear("a", "x", "a"),
        linear("b", "a", "b"),
        linear("c", "b", "c"),
        step("d", "sin", Value("c")),
        linear("e", "d", "a"),
        linear("f", "e", "b"),
        linear("g", "f", "a"),
        step("h", "sin", Value("g")),
        linear("i", "h", "b"),
    ]
    assert_same(steps, (Value("i"), Value("b")), x_of(3, H), functions={"sin": torch.sin}, lengths=[3, 3])


def test_a_sequence_that_goes_on_behind_a_chain_is_left_out():
    """A library gives chains tensors only."""
    steps = [
        linear("a", "x", "a"),
        linear("b", "a", "b"),
        linear("c", "b", "c"),
        view("s", "split_with_sizes.default", Value("c"), [H // 2, H // 2], -1),
        step("t", "count", Value("s")),
    ]
    assert_same(steps, (Value("t"),), x_of(3, H), functions={"count": lambda s: s[0] + s[1]}, lengths=[3])


def test_items_taken_out_behind_another_call_are_taken_out_at_once():
    steps = [
        linear("a", "x", "a"),
        linear("b", "a", "b"),
        step("p", "native add_rms_norm", Value("b"), Value("x"), Constant("norm"), 1e-5),
        item("o", "p", 0),
        step("d", "sin", Value("o")),
        item("r", "p", 1),
        linear("e", "r", "a"),
        linear("f", "e", "b"),
        linear("g", "f", "a"),
    ]
    given = {"functions": {"sin": torch.sin}, "constants": constants}
    assert_same(steps, (Value("g"), Value("d")), x_of(3, H), lengths=[3, 3], **given)


def test_numbers_of_each_kind():
    """Floats keep every bit, negative ones and infinities too; sizes are those of the call."""
    q, cache = x_of(1, 4, 16), x_of(3, 8, 2, 16)
    names = ("q", "k", "v", "blocks", "length", "out", "most")
    args = [
        Value("q"),
        Value("k"),
        Value("v"),
        Value("blocks"),
        8,
        Value("length"),
        Value("most"),
        4,
        2,
        Value("out"),
    ]
    steps = [
        linear("a", "w", "a"),
        linear("b", "a", "b"),
        step("none", "native paged_decode_attention", *args, 0.1, -1, 0.0, None, None),
        view("c", "reshape.default", Value("out"), [1, -1]),
    ]
    given = (
        q,
        cache,
        cache,
        torch.tensor([[2, 0]]),
        torch.tensor([11]),
        torch.zeros(1, 4, 16).bfloat16(),
        11,
    )
    plain, chained = programs(steps, (Value("c"), Value("b")), (*names, "w"))
    assert joined(chained) == [4]
    w = x_of(1, H)
    results = [
        program(*(g.clone() if torch.is_tensor(g) else g for g in given), w) for program in (plain, chained)
    ]
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].abs().sum() > 0
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_of_8_bit_weights_is_one_call(tokens, dtype):
    """A kernel is told which dtypes it gives."""
    numbers = torch.randint(-128, 128, (H, H), dtype=torch.int8)
    held = {"w": numbers, "scale": torch.rand(H, 1), "norm": torch.rand(H, dtype=dtype)}

    def product(name, source):
        given = item(f"{source}0", source, 0), item(f"{source}1", source, 1)
        scales = Value(f"{source}1"), Constant("scale")
        args = Value(f"{source}0"), Constant("w"), *scales, dtype, torch.int8, Constant("norm")
        return [*given, step(name, "native linear_w8a8", *args)]

    steps = [
        step("n", "native rms_norm_w8a8", Value("x"), Constant("norm"), 1e-6, torch.int8),
        *product("a", "n"),
        step("q", "native dynamic_quant", Value("a"), torch.int8),
        *product("b", "q"),
        step("m", "native add_rms_norm_w8a8", Value("b"), Value("x"), Constant("norm"), 1e-6, torch.int8),
        item("m2", "m", 2),
        *product("c", "m"),
    ]
    x = torch.randn(2, tokens, H).to(dtype)
    assert_same(steps, (Value("c"), Value("m2")), x, constants=held, lengths=[6])


def test_what_is_written_is_written_in_order():
    k, v = x_of(2, 2, 16), x_of(2, 2, 16)
    k_cache, v_cache = torch.zeros(3, 8, 2, 16).bfloat16(), torch.zeros(3, 8, 2, 16).bfloat16()
    caches = Value("k_cache"), Value("v_cache")
    steps = [
        step("w0", "native fill_kv_cache", Value("k"), Value("v"), *caches, Value("slots")),
        step("w1", "native fill_kv_cache", Value("v"), Value("k"), *caches, Value("slots")),
        view("a", "reshape.default", Value("k_cache"), [-1]),
    ]
    _, chained = programs(steps, (Value("a"),), ("k", "v", "k_cache", "v_cache", "slots"))
    assert joined(chained) == [3]
    (flat,) = chained(k, v, k_cache, v_cache, torch.tensor([5, 17]))
    assert torch.equal(k_cache.view(24, 2, 16)[[5, 17]], v)
    assert flat.data_ptr() == k_cache.data_ptr()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_names_the_step(bad):
    steps = [
        linear(name, before, "a" if i != bad else "odd")
        for i, (before, name) in enumerate(["xa", "ab", "bc"])
    ]
    _, chained = programs(steps, (Value("c"),), constants=weights | {"odd": torch.ones(3, 5).bfloat16()})
    with pytest.raises(GraphRunError, match=r"linear: x has 64 in_features, weight has 5") as info:
        chained(x_of(2, H))
    assert f"model.py, {'abc'[bad]}" in str(info.value)
    assert f"step {bad}" not in str(info.value)


def test_an_error_of_a_view_names_the_step(capfd):
    steps = [linear("a", "x", "a"), linear("b", "a", "b"), view("c", "view.default", Value("b"), [5, 5])]
    _, chained = programs(steps, (Value("c"),))
    reason = rf"shape '\[5, 5\]' is invalid for input of size 128|{UNKNOWN}"
    with pytest.raises(GraphRunError, match=rf"model.py, c.*({reason})") as info:
        chained(x_of(2, H))
    assert (capfd.readouterr().err == "") is (UNKNOWN not in str(info.value))


def test_threads_run_one_chain_at_once():
    steps = [linear("a", "x", "a"), linear("b", "a", "b"), linear("c", "b", "c")] * 1
    plain, chained = programs(steps, (Value("c"),))
    given = [x_of(n + 1, H) for n in range(6)]
    wanted = [plain(x)[0] for x in given]
    wrong = []

    def work(index):
        for _ in range(50):
            if not torch.equal(chained(given[index])[0], wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_python_runs_meanwhile():
    """A chain holds no lock of the interpreter."""
    big = torch.randn(4096, 4096).bfloat16()
    names = [f"a{i}" for i in range(12)]
    steps = [linear(name, before, "big") for before, name in zip(["x", *names], names, strict=False)]
    _, chained = programs(steps, (Value(names[-1]),), constants={"big": big})
    assert joined(chained) == [12]
    running, ticks, x = True, 0, x_of(1, 4096)

    def count():
        nonlocal ticks
        while running:
            ticks += 1
            time.sleep(0)  # gives the lock back

    thread, interval = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from now on a thread keeps the lock until it gives it back
    thread.start()
    try:
        for _ in range(100):  # on a busy machine the other thread may not get a core during one call
            before = ticks
            chained(x)
            if ticks > before:
                break
        else:
            pytest.fail("no other thread ran during a call")
    finally:
        running = False
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.parametrize(("count", "told"), [(chains.LONG - 1, 0), (chains.LONG, 1)])
def test_a_long_chain_tells_that_it_computes(count, told):
    names = [f"a{i}" for i in range(count)]
    steps = [linear(name, before, "w") for before, name in zip(["x", *names], names, strict=False)]
    _, chained = programs(steps, (Value(names[-1]),), constants={"w": torch.randn(8, 8).bfloat16()})
    assert joined(chained) == [count]
    before = computing.count()
    chained(x_of(1, 8))
    assert computing.count() - before == told


def test_only_what_is_read_later_leaves_a_chain():
    steps = [
        linear("a", "x", "a"),
        linear("b", "a", "b"),
        linear("c", "b", "c"),
        step("d", "sin", Value("b")),
    ]
    _, chained = programs(steps, (Value("c"), Value("d")), functions={"sin": torch.sin})
    assert [line.names for line in chained._lines if isinstance(line, Joined)] == [("b", "c")]


def test_a_chain_ends_with_its_program():
    """Its memory is freed when the next chain is made."""
    steps = [linear("a", "x", "a"), linear("b", "a", "b"), linear("c", "b", "c")]
    _, chained = programs(steps, (Value("c"),))
    (chain,) = chained._joined.values()
    assert isinstance(chain, chains.Chain)
    handle = chain.handle
    del chain
    chained(x_of(1, H))
    del chained
    gc.collect()
    programs(steps, (Value("c"),))
    with pytest.raises(RuntimeError, match=f"there is no chain {handle}"):
        torch.ops.dlinfer_cpu.run_chain(handle, [], [])


def test_a_chain_that_ends_while_somebody_traces_is_not_in_their_graph():
    steps = [linear("a", "x", "a"), linear("b", "a", "b"), linear("c", "b", "c")]
    held = [programs(steps, (Value("c"),))]

    def traced(x):
        held.clear()
        gc.collect()
        return x + 1

    graph = make_fx(traced, pre_dispatch=True)(torch.ones(2)).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["aten.add.Tensor"]


def test_numbers_that_do_not_fit_and_kinds_that_are_not_known_are_left_to_python():
    for args in [(1 << 70,), (torch.float16,), ("x",), (1.5,)]:
        steps = [
            linear("a", "x", "a"),
            linear("b", "a", "b"),
            view("c", "select.int", Value("b"), 0, *args),
        ]
        assert joined(programs(steps, (Value("c"),))[1]) == []


def test_without_the_library_nothing_is_joined(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    steps = [linear("a", "x", "a"), linear("b", "a", "b"), linear("c", "b", "c")]
    assert chains.join(steps, ["c"]) == (steps, {})


def test_code_that_is_not_sound_is_refused():
    make = torch.ops.dlinfer_cpu.make_chain
    for code in ([], [1, 1, 0], [0, 0, 0, 1, 0, 3, 120, 121, 122, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 9]):
        with pytest.raises(RuntimeError, match="make_chain"):
            make(code)


def test_a_size_is_no_tensor():
    steps = [
        step("n", "mul", Value("m"), 2),
        view("a", "reshape.default", Value("x"), [Value("n"), -1]),
        view("b", "unsqueeze.default", Value("a"), 0),
        view("c", "unsqueeze.default", Value("b"), 0),
    ]
    assert_same(
        steps, (Value("c"),), x_of(4, H), 4, inputs=("x", "m"), functions={"mul": operator.mul}, lengths=[3]
    )
