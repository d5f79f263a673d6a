"""What Dynamo says of a graph and of its compilations."""

import pytest
import torch

from dlinfer.graph.torch_private import dynamo, fake_mode
from tests.graph.torch_private.asking import asked_in_backend


def small(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.reshape(x.shape[0] * 2, -1) * k


def test_inputs_given_twice_are_named():
    x = torch.ones(3)
    found = asked_in_backend(dynamo.inputs_given_twice, lambda a, b: a + b, x, x)
    assert found == [("L['b']", "L['a']")]
    assert asked_in_backend(dynamo.inputs_given_twice, lambda a, b: a + b, x, x + 1) == []


def test_what_was_taken_as_a_constant():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.times, self.doubled = 3, True

        def forward(self, x):
            return x * self.times if self.doubled else x

    found = asked_in_backend(dynamo.constants_read, Scaled(), torch.ones(3))
    assert {"L['self'].times", "L['self'].doubled"} <= set(found)

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Scaled()

        def forward(self, x):
            return self.inner(x)

    found = asked_in_backend(dynamo.constants_read, Around(), torch.ones(3))
    assert "L['self']._modules['inner']._forward_hooks" in found


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
    assert dynamo.source_name(source) == name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['norm']._parameters['weight']", "norm.weight"),
        ("L['self']._parameters['weight']", "weight"),
        ("L['model'].encoder._modules['norm']._parameters['weight']", "norm.weight"),
        ("L['x']", "x"),
    ],
)
def test_weights_are_named_as_in_their_model(source, name):
    assert dynamo.name_in_module(source) == name


def test_graph_breaks_are_listed_with_reason_and_line():
    def broken(x):
        print("in between")
        return x + 1

    before = len(dynamo.graph_breaks())
    dynamo.compile_apart(broken, lambda graph_module, _: graph_module.forward, None)(torch.ones(2))
    ((reason, line),) = dynamo.graph_breaks()[before:]
    assert "print" in reason
    assert line.startswith(f"{__file__}:")
    assert line.endswith(", in broken")


def test_compiling_apart_uses_nothing_compiled_before():
    ran = []

    def backend(graph_module, example_inputs):
        ran.append(dynamo.recompilation_cause())
        return graph_module.forward

    def double(x):
        return x * 2

    for _ in range(2):
        compiled = dynamo.compile_apart(double, backend, False)
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    assert ran == ["", ""]


def test_dynamos_fake_mode_and_twins_of_its_inputs():
    assert dynamo.dynamo_fake_mode() is None
    base = torch.ones(12)
    seen = []

    def backend(graph_module, example_inputs):
        mode = dynamo.dynamo_fake_mode()
        assert isinstance(mode, fake_mode.FakeTensorMode)
        fakes = dynamo.fakes_of_inputs(mode, example_inputs)
        seen.append((graph_module, fakes, mode))
        return graph_module.forward

    dynamo.compile_apart(lambda a, b: a + b, backend, True)(base[:6], base[6:])
    ((graph_module, fakes, mode),) = seen
    tensors = [value for value in fakes if isinstance(value, torch.Tensor)]
    assert all(isinstance(value, fake_mode.FakeTensor) and value.fake_mode is mode for value in tensors)
    assert all(isinstance(value.shape[0], torch.SymInt) for value in tensors)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    examples = [node.meta["example_value"] for node in placeholders]
    wanted = [str(value.shape) for value in examples if isinstance(value, torch.Tensor)]
    assert [str(value.shape) for value in tensors] == wanted, "with the symbols that Dynamo chose"
    assert fake_mode.storage_id(tensors[0]) == fake_mode.storage_id(tensors[1]), (
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
        static = [dynamo.is_static_input(node) for node in placeholders]
        seen.extend(zip(dynamo.input_sources(graph_module.graph), static, strict=True))
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
        told.append(dynamo.recompilation_cause())
        return graph_module.forward

    compiled = dynamo.compile_apart(small, backend, None)
    for x, k in ((torch.ones(4, 6), 2), (torch.ones(4, 6, dtype=torch.float64), 2)):
        compiled(x, k)
    (first, again) = told
    assert first == ""
    assert "dtype" in again


def test_dynamo_errors_are_caught_and_explained():
    def unsupported(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(dynamo.dynamo_errors()) as caught:
        torch.compile(unsupported, backend="eager", fullgraph=True)(torch.ones(2))
    reason, line = dynamo.explain_dynamo_error(caught.value)
    assert reason
    assert __file__ in line

    def refuses(graph_module, example_inputs):
        raise ValueError("not this one")

    with pytest.raises(dynamo.dynamo_errors()) as caught:
        torch.compile(small, backend=refuses)(torch.ones(4, 6), 2)
    assert dynamo.explain_dynamo_error(caught.value)[0] == "not this one"


def test_unbacked_sizes_serve_size_1_too():
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    def double(x):
        return x * 2

    x = torch.ones(4, 6)
    dynamo.mark_unbacked(x, 0, "rows")
    compiled = dynamo.compile_apart(double, backend, None)
    for rows in (x, torch.ones(1, 6), torch.ones(9, 6)):
        torch.testing.assert_close(compiled(rows), rows * 2)
    assert len(graphs) == 1


def test_a_fixed_size_is_a_number_where_all_sizes_may_change():
    shapes = []

    def backend(graph_module, example_inputs):
        values = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        shapes.extend(value.shape for value in values if isinstance(value, torch.Tensor))
        return graph_module.forward

    def double(x):
        return x * 2

    x = torch.ones(4, 6)
    dynamo.mark_unbacked(x, 0, "rows")
    dynamo.mark_fixed(x, 1)
    dynamo.compile_apart(double, backend, True)(x)
    assert [type(size) for shape in shapes for size in shape] == [torch.SymInt, int]


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
    dynamo.forget_compiled(double)
    compiled(torch.ones(2))
    assert len(graphs) == 2


def test_what_a_call_breaks_at_once_is_told():
    """A size of 1 that is broadcast is taken for equal to the other."""
    x, y = torch.ones(1, 3), torch.ones(5, 3)
    dynamo.mark_unbacked(x, 0, "one")
    dynamo.mark_unbacked(y, 0, "other")
    with pytest.raises(AssertionError) as caught:
        torch.compile(lambda x, y: x * y, backend="eager", fullgraph=True)(x, y)
    assert dynamo.broken_at_once(caught.value) == "y.size()[0] == x.size()[0]"
    assert dynamo.broken_at_once(AssertionError("another")) == ""
