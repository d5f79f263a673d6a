"""Each private part of torch behind the seam, used on a small case: what a torch release moves fails here, by name."""

import inspect
import sys
from typing import Any

import pytest
import torch

from dlinfer.graph.seam import torch_seam


def asked_in_backend(question, function, *args):
    """What ``question`` answers inside Dynamo's call of a backend."""
    answers = []

    def backend(graph_module, example_inputs):
        answers.append(question())
        return graph_module.forward

    torch_seam.compile_apart(function, backend, True)(*args)
    (answer,) = answers
    return answer


def dynamo_mode() -> torch_seam.FakeTensorMode:
    mode = torch_seam.dynamo_fake_mode()
    assert mode is not None
    return mode


def tall(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 3 else x


def test_shape_guards_give_condition_and_line():
    found = asked_in_backend(lambda: torch_seam.shape_guards(dynamo_mode()), tall, torch.ones(5, 7))
    assert any("> 3" in guard and "x.shape[0] > 3" in guard for guard in found)


def test_conditions_say_what_holds_and_where_to_read_it():
    seen = []

    def backend(graph_module, example_inputs):
        examples = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        named = list(zip(torch_seam.input_sources(graph_module.graph), examples, strict=True))
        seen.append(torch_seam.conditions(dynamo_mode(), named))
        tensors = [value for value in examples if isinstance(value, torch.Tensor)]
        seen.append([list(map(torch_seam.fixed_size, value.shape)) for value in tensors])
        return graph_module.forward

    def function(x, y):
        return x.view(-1, 7) * 2 + y.sum() if x.shape[1] == 7 and x.shape[0] > 3 else x

    torch_seam.compile_apart(function, backend, True)(torch.ones(5, 7), torch.ones(5))
    found, sizes = seen
    assert ("v0 == v1", ("L['x'].size()[0]", "L['y'].size()[0]")) in found
    assert ("v0 > 3", ("L['x'].size()[0]",)) in found
    assert ("v0 == 7", ("L['x'].size()[1]",)) in found
    assert sizes == [[None, 7], [None]]


def test_inputs_given_twice_are_named():
    x = torch.ones(3)
    found = asked_in_backend(torch_seam.inputs_given_twice, lambda a, b: a + b, x, x)
    assert found == [("L['b']", "L['a']")]
    assert asked_in_backend(torch_seam.inputs_given_twice, lambda a, b: a + b, x, x + 1) == []


def test_an_export_whose_writes_are_outputs_is_told_apart():
    class Counts(torch.nn.Module):
        seen: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(1)
            return x + self.seen

    exported = torch.export.export(Counts(), (torch.ones(2),))
    assert torch_seam.export_gives_results_only(exported)
    assert not torch_seam.export_gives_results_only(exported.run_decompositions())


def test_sized_symbols_give_values_and_source():
    found = asked_in_backend(lambda: torch_seam.sized_symbols(dynamo_mode()), tall, torch.ones(5, 7))
    assert sorted(found.values()) == ["2 and more, x.size()[1]", "4 and more, x.size()[0]"]


def test_example_numbers_are_those_of_the_captured_call():
    def numbers():
        environment = dynamo_mode().shape_env
        assert environment is not None
        made = [
            environment.create_symintnode(symbol, hint=int(environment.backed_var_to_val[symbol]))
            for symbol in environment.var_to_sources
        ]
        return sorted(torch_seam.example_number(number) for number in made)

    assert asked_in_backend(numbers, tall, torch.ones(5, 7)) == [5, 7]
    assert torch_seam.example_number(3) == 3


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['x'].size()[0]", "x.size()[0]"),
        ("L['self']._modules['layers']._modules['0'].eps", "self.layers.0.eps"),
        ("L['kwargs']['past_key_values'].layers[0].keys", "kwargs['past_key_values'].layers[0].keys"),
        ("G['scale']", "G['scale']"),
    ],
)
def test_sources_are_named_as_people_write_them(source, name):
    assert torch_seam.source_name(source) == name


def test_graph_breaks_are_listed_with_reason_and_line():
    def broken(x):
        print("in between")
        return x + 1

    before = len(torch_seam.graph_breaks())
    torch_seam.compile_apart(broken, lambda graph_module, _: graph_module.forward, None)(torch.ones(2))
    ((reason, line),) = torch_seam.graph_breaks()[before:]
    assert "print" in reason
    assert line.startswith(f"{__file__}:")
    assert line.endswith(", in broken")


def test_compiling_apart_uses_nothing_compiled_before():
    ran = []

    def backend(graph_module, example_inputs):
        ran.append(torch_seam.recompilation_cause())
        return graph_module.forward

    def double(x):
        return x * 2

    for _ in range(2):
        compiled = torch_seam.compile_apart(double, backend, False)
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    assert ran == ["", ""]


# --- inside Dynamo's call of a backend


def small(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.reshape(x.shape[0] * 2, -1) * k


def test_dynamos_fake_mode_and_twins_of_its_inputs():
    assert torch_seam.dynamo_fake_mode() is None
    base = torch.ones(12)
    seen = []

    def backend(graph_module, example_inputs):
        mode = torch_seam.dynamo_fake_mode()
        assert isinstance(mode, torch_seam.FakeTensorMode)
        fakes = torch_seam.fakes_of_inputs(mode, example_inputs)
        seen.append((graph_module, fakes, mode))
        return graph_module.forward

    torch_seam.compile_apart(lambda a, b: a + b, backend, True)(base[:6], base[6:])
    ((graph_module, fakes, mode),) = seen
    tensors = [value for value in fakes if isinstance(value, torch.Tensor)]
    assert all(isinstance(value, torch_seam.FakeTensor) and value.fake_mode is mode for value in tensors)
    assert all(isinstance(value.shape[0], torch.SymInt) for value in tensors)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    examples = [node.meta["example_value"] for node in placeholders]
    wanted = [str(value.shape) for value in examples if isinstance(value, torch.Tensor)]
    assert [str(value.shape) for value in tensors] == wanted, "with the symbols that Dynamo chose"
    assert torch_seam.storage_id(tensors[0]) == torch_seam.storage_id(tensors[1]), (
        "views of one memory still are"
    )


def test_sources_of_inputs_and_static_inputs():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.inner(x)

    model, seen = Model(), []

    def backend(graph_module, example_inputs):
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        static = [torch_seam.is_static_input(node) for node in placeholders]
        seen.extend(zip(torch_seam.input_sources(graph_module.graph), static, strict=True))
        return graph_module.forward

    torch.compile(model, backend=backend)(torch.ones(4, 3))
    assert dict(seen) == {
        "L['self']._modules['inner']._parameters['weight']": True,
        "L['self']._modules['inner']._parameters['bias']": True,
        "L['x']": False,
    }


def test_the_cause_of_a_recompilation():
    told = []

    def backend(graph_module, example_inputs):
        told.append(torch_seam.recompilation_cause())
        return graph_module.forward

    compiled = torch_seam.compile_apart(small, backend, None)
    for x, k in ((torch.ones(4, 6), 2), (torch.ones(4, 6, dtype=torch.float64), 2)):
        compiled(x, k)
    (first, again) = told
    assert first == ""
    assert "dtype" in again


def test_dynamo_errors_are_caught_and_explained():
    def unsupported(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch_seam.dynamo_errors()) as caught:
        torch.compile(unsupported, backend="eager", fullgraph=True)(torch.ones(2))
    reason, line = torch_seam.explain_dynamo_error(caught.value)
    assert reason
    assert __file__ in line

    def refuses(graph_module, example_inputs):
        raise ValueError("not this one")

    with pytest.raises(torch_seam.dynamo_errors()) as caught:
        torch.compile(small, backend=refuses)(torch.ones(4, 6), 2)
    assert torch_seam.explain_dynamo_error(caught.value)[0] == "not this one"


def test_unbacked_sizes_serve_size_1_too():
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    def double(x):
        return x * 2

    x = torch.ones(4, 6)
    torch_seam.mark_unbacked(x, 0, "rows")
    compiled = torch_seam.compile_apart(double, backend, None)
    for rows in (x, torch.ones(1, 6), torch.ones(9, 6)):
        torch.testing.assert_close(compiled(rows), rows * 2)
    assert len(graphs) == 1


def test_what_was_compiled_is_forgotten():
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    def double(x):
        return x * 2

    compiled = torch.compile(double, backend=backend)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    torch_seam.forget_compiled(double)
    compiled(torch.ones(2))
    assert len(graphs) == 2


# --- tracing and compiling


def test_tracing_before_dispatch_and_below():
    mode = torch_seam.fresh_mode()
    x, w = mode.from_tensor(torch.ones(2, 3)), mode.from_tensor(torch.ones(3, 3))

    def model(x, w):
        x.add_(1)
        return torch.nn.functional.linear(x, w) + torch.ones(1)

    def calls(graph):
        return [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]

    coarse = calls(torch_seam.trace_coarse(model, [x, w], mode))
    assert {"linear", "add_"} <= set(coarse)
    assert "linear" not in calls(torch_seam.trace_coarse(model, [x, w], mode, decomposed=True))

    def silu_of(x):
        return torch.nn.functional.silu(x)

    table = torch_seam.inductor_decompositions()
    assert torch.ops.aten.silu.default in table
    silu = torch_seam.trace_decomposed(silu_of, [x], mode, table)
    assert "silu" not in calls(silu)
    assert torch_seam.mode_of([3, x]) is mode


def test_what_inductor_has_no_loop_for():
    assert torch_seam.inductor_calls_library(torch.ops.aten._fft_r2c.default)
    assert not torch_seam.inductor_calls_library(torch.ops.aten.mul.Tensor)


@pytest.mark.slow
def test_loops_are_compiled_saved_and_loaded(tmp_path):
    mode = torch_seam.fresh_mode()
    x = mode.from_tensor(torch.ones(2, 3))

    def model(x):
        return (x * 2 + 1, x + torch.zeros(2, 3))

    graph = torch_seam.trace_decomposed(model, [x], mode, torch_seam.inductor_decompositions())
    compiled = torch_seam.compile_loops(graph, [x], mode)
    torch_seam.save_loops(compiled, str(tmp_path / "loops"))
    given = torch.arange(6.0).view(2, 3)
    for run in (compiled, torch_seam.load_loops(str(tmp_path / "loops"))):
        results = run(given)
        torch.testing.assert_close(tuple(results), model(given))
        assert results[1].data_ptr() != given.data_ptr(), "a result is no input in disguise"
    (tmp_path / "loops").write_bytes(b"damaged")
    with pytest.raises(Exception):  # noqa: B017 -- any refusal will do
        torch_seam.load_loops(str(tmp_path / "loops"))


@pytest.mark.slow
def test_large_results_of_loops_come_from_where_they_are_told(tmp_path):
    from torch._inductor.codecache import PyCodeCache

    mode = torch_seam.fresh_mode()
    x = mode.from_tensor(torch.ones(64, 64))
    made = []

    def large(size, stride, dtype, item_bytes):
        made.append((size, stride, dtype, item_bytes))
        return torch.empty_strided(size, stride, dtype=dtype)

    def model(x):
        return (x * 3 - 1, x.sum(1) + 1)

    graph = torch_seam.trace_decomposed(model, [x], mode, torch_seam.inductor_decompositions())
    with torch_seam.results_from(large, 64 * 64 * 4):
        compiled = torch_seam.compile_loops(graph, [x], mode)
    torch_seam.save_loops(compiled, str(tmp_path / "loops"))
    PyCodeCache.cache_clear()  # as in another process
    with torch_seam.results_from(large, 64 * 64 * 4):
        loaded = torch_seam.load_loops(str(tmp_path / "loops"))
    given = torch.arange(4096.0).view(64, 64)
    for run in (compiled, loaded):
        torch.testing.assert_close(tuple(run(given)), model(given))
        assert made == [((64, 64), (64, 1), torch.float32, 4)], "the sums are small"
        made.clear()


# --- symbols


def test_symbols_ranges_and_copies_of_them():
    def questions():
        mode: Any = torch_seam.dynamo_fake_mode()
        (symbol, *_) = mode.shape_env.var_to_sources
        hint = int(mode.shape_env.backed_var_to_val[symbol])
        size = mode.shape_env.create_symintnode(symbol, hint=hint)
        with mode:
            tensor = torch.empty(size * 2, 3)
        assert torch_seam.plain_symbol(size) == symbol
        assert torch_seam.plain_symbol(size * 2) is torch_seam.plain_symbol(5) is None
        assert torch_seam.free_symbols(tensor) == torch_seam.free_symbols(size) == {symbol}
        assert torch_seam.symbol_ranges([tensor, 3])[str(symbol)] == str(mode.shape_env.var_to_range[symbol])
        assert not torch_seam.free_unbacked_symbols(size)

        own: Any = torch_seam.fresh_mode()
        other: Any = torch_seam.fresh_mode()
        fresh = torch_seam.fresh_symbol(own, symbol, mode.shape_env, 0)
        twice = torch_seam.symbolic_number(own, size * 2, {symbol: fresh})
        assert twice.node.expr == 2 * fresh
        assert bool(twice > 8)  # the range of tall's rows does not answer that
        (guard,) = torch_seam.guards_of(own)
        assert torch_seam.guard_all([guard], {fresh: symbol}, mode.shape_env)
        assert str(mode.shape_env.guards[-1].expr) in (f"{symbol} > 4", f"2*{symbol} > 8")
        assert torch_seam.guard_all([], {}, None)
        with other:
            unbacked = other.shape_env.create_unbacked_symint()
            assert torch_seam.free_unbacked_symbols(unbacked)
            copy = torch_seam.fresh_symbol(own, unbacked.node.expr, other.shape_env, 1)
            assert torch_seam.free_unbacked_symbols(
                torch_seam.symbolic_number(own, unbacked, {unbacked.node.expr: copy})
            )
        return True

    assert asked_in_backend(questions, tall, torch.ones(5, 7))


def test_kinds_of_tensors_and_ops():
    from torch.testing._internal.two_tensor import TwoTensor

    assert torch_seam.is_traceable_wrapper_subclass(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not torch_seam.is_traceable_wrapper_subclass(torch.nn.Parameter(torch.ones(2)))
    assert isinstance(torch.ops.higher_order.cond, torch_seam.HigherOrderOperator)


# --- torch.export


def test_kinds_of_an_exported_programs_inputs():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x, n):
            return x * self.weight * self.scale * torch.tensor([1.0, 2.0, 3.0])

    dynamic = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "n": None}
    exported = torch.export.export(Model(), (torch.ones(4, 3), 7), dynamic_shapes=dynamic)
    kinds = torch_seam.export_kinds(exported)
    assert sorted(kind for kind, _, _ in kinds).count("user") == 2
    assert {"weight", "scale"} <= {target for kind, target, _ in kinds if kind != "user"}
    assert 7 in [constant for _, _, constant in kinds]
    (x,) = [n for n in exported.graph.find_nodes(op="placeholder") if n.name == "x"]
    assert torch_seam.size_range(x.meta["val"].shape[0]) == (2, 64)
    assert torch_seam.size_range(3) == 3


def test_every_name_of_the_seam_is_used_here():
    source = inspect.getsource(sys.modules[__name__])
    public = [
        name
        for name, value in vars(torch_seam).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == torch_seam.__name__
    ]
    assert [name for name in {*public, *torch_seam.__all__} if f"torch_seam.{name}" not in source] == [
        "ShapeEnv"
    ]
