"""Regions as functions of values: what a caller sees of results, writes and shared memory is what eager does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from dlinfer.errors import NotAFunctionError
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.functional.functionalize import function_of
from dlinfer.graph.ir.extract import extract
from dlinfer.graph.torch_private import fake_mode
from dlinfer.ops import fill_kv_cache
from tests.graph.compiling import (
    ValueEngine,
    ValueRun,
    compiled,
    last_report,
    same_as_eager,
    use_engine,
)

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture
def engine(monkeypatch) -> ValueEngine:
    made = ValueEngine()
    use_engine(monkeypatch, made)
    return made


def tensor(*sizes: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(sizes).numel())).reshape(sizes) + 1


# --- writes


def add_in_place(x):
    return x.add_(1) * 2


def copy_broadcast(x, y):
    x.copy_(y)
    return x + 1


def converted(x, y):
    x.mul_(y)
    return x


def compared(x, y):
    x.lt_(y)
    return x * 2


def filled(x):
    x.zero_()
    x[0].fill_(3)
    return x.sum()


def through_a_slice(x, y):
    x[:, 1:3].copy_(y)
    return x.sum(0)


def through_views(x, y):
    x.view(2, 2, 4).transpose(0, 1)[1].add_(y)
    return x + 0


def through_a_step(x):
    x[::2, 1] += 5
    return x.clone()


def through_parts(x):
    one, two = x.split(2, 1)
    two.mul_(one)
    for row in x.unbind(0):
        row.add_(1)
    return one + two


def by_narrow(x, y):
    x.narrow(1, 1, 2).copy_(y)
    return x


def read_before_and_after(x):
    before = x * 1
    part = x[1]
    x.mul_(3)
    return before + part


def own_memory(x):
    y = torch.zeros_like(x)
    y[1:] = x[1:]
    y += 1
    return y, y.view(-1)


def indexed(x, y):
    at = torch.tensor([2, 0])
    x.index_copy_(0, at, y)
    x.index_put_((at, at), y[:, 0], accumulate=True)
    x.index_fill_(1, at, 7.0)
    return x.sum(1)


def masked(x):
    x.masked_fill_(x > 4, -1.0)
    x[x < 0] = 9.0
    return x


def swapped(x, y):
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return x - y


def through_swapped_axes(x, y):
    x.swapaxes(0, 1).mul_(2)
    x.swapdims(1, 0)[0].add_(y)
    return x.sum(0)


def through_reversed_axes(x):
    torch.ops.aten.numpy_T(x.unsqueeze(0))[1].add_(2)
    return x.sum(0)


def flipped(x):
    x.copy_(x.flip(0))
    return x + 1


WRITES = [
    (add_in_place, (tensor(3, 4),)),
    (copy_broadcast, (tensor(3, 4), tensor(4))),
    (copy_broadcast, (tensor(3, 4).bfloat16(), tensor(4))),
    (converted, (tensor(3, 4).bfloat16(), tensor(3, 4))),
    (compared, (tensor(3, 4), tensor(3, 4).flip(0))),
    (filled, (tensor(3, 4),)),
    (through_a_slice, (tensor(3, 4), tensor(3, 2))),
    (through_views, (tensor(4, 4), tensor(2, 4))),
    (through_a_step, (tensor(5, 4),)),
    (through_parts, (tensor(3, 4),)),
    (by_narrow, (tensor(3, 4), tensor(3, 2))),
    (read_before_and_after, (tensor(3, 4),)),
    (own_memory, (tensor(3, 4),)),
    (indexed, (tensor(4, 4), tensor(2, 4))),
    (masked, (tensor(3, 4),)),
    (swapped, (tensor(3, 4), tensor(3, 4) * 2)),
    (through_swapped_axes, (tensor(3, 4), tensor(3))),
    (through_reversed_axes, (tensor(3, 4),)),
    (flipped, (tensor(3, 4),)),
    (add_in_place, (tensor(4, 3).t(),)),
    (through_a_slice, (tensor(4, 3).t(), tensor(3, 2))),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize(("function", "args"), WRITES, ids=lambda value: getattr(value, "__name__", ""))
def test_writes(engine, function, args, dynamic):
    same_as_eager(function, *args, dynamic=dynamic)
    assert engine.functions


# --- shared memory of results


def input_itself(x):
    return x, x + 1


def view_of_input(x):
    return x.view(-1)[2:], x.t()


def result_twice(x):
    y = x * 2
    return y, y, y.t()


def overlapping_results(x):
    y = (x * 2).view(-1)
    return y[1:], y[:3], y.sum()


def written_after_it_was_viewed(x):
    y = x * 2
    part = y[1]
    y.add_(10)
    return part, y


def test_a_view_is_a_tensor_of_its_own(engine):
    def model(x):
        y = x * 2
        return y, y.view(3, 4), y.float()

    x = tensor(3, 4)
    made = compiled(model)(x)
    for one in (made, model(x)):
        one[0].t_()
        assert [tuple(each.shape) for each in one] == [(4, 3), (3, 4), (4, 3)]


def permuted(x):
    return (x.t() * 2).relu(), x.transpose(0, 1).contiguous()


def strided_norm(x):
    return F.layer_norm(x.t(), (3,)).transpose(0, 1)


def sizes(x):
    return x.view(-1, 2), x.shape[0] * 2, (x + 1).view(x.shape[0] // 2, 2, -1)


RESULTS = [
    input_itself,
    view_of_input,
    result_twice,
    overlapping_results,
    written_after_it_was_viewed,
    permuted,
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("function", RESULTS, ids=lambda value: value.__name__)
def test_results(engine, function, dynamic):
    same_as_eager(function, tensor(3, 4), dynamic=dynamic)
    assert engine.functions


def test_results_of_permuted_inputs(engine):
    same_as_eager(strided_norm, tensor(3, 4))
    same_as_eager(permuted, tensor(4, 3).t())


def test_sizes_are_results_too(engine):
    same_as_eager(sizes, tensor(4, 6), dynamic=True)


def test_channels_last(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    same_as_eager(model, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))


# --- caches


class Cache(nn.Module):
    """As transformers' static cache: written at some positions, then read whole."""

    keys: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 8, 4))

    def forward(self, x, at):
        self.keys.index_copy_(1, at, x)
        return F.scaled_dot_product_attention(x, self.keys, self.keys)


def test_a_cache_may_be_written_where_it_lies(engine):
    same_as_eager(Cache(), torch.randn(2, 2, 4), torch.tensor([3, 4]))
    (function,) = engine.functions
    (written,) = [index for index in function.writes if index is not None]
    assert function.in_place == {written}


def test_a_permutation_of_itself_may_not(engine):
    same_as_eager(flipped, tensor(3, 4))
    (function,) = engine.functions
    assert not function.in_place, "an element would be read after it was written"


def test_what_is_read_twice_may_not(engine):
    same_as_eager(read_before_and_after, tensor(3, 4))
    (function,) = engine.functions
    assert not function.in_place


def paged(k, v, keys, values, slots):
    fill_kv_cache(k, v, keys, values, slots)
    return keys.sum(), values[0] + 1


def test_paged_caches(engine):
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    keys, values = torch.zeros(2, 4, 2, 4), torch.zeros(2, 4, 2, 4)
    same_as_eager(paged, k, v, keys, values, torch.tensor([1, 5, -1]))
    (function,) = engine.functions
    assert len(function.in_place) == 2
    targets = [str(n.target) for n in function.graph_module.graph.nodes if n.op == "call_function"]
    assert "dlinfer_values.dlinfer_fill_kv_cache.default" in targets


def two_layers(k, first, second, slots):
    fill_kv_cache(k, k, first[0], first[1], slots)
    fill_kv_cache(k + first[0].sum(), k, second[0], second[1], slots)
    return second[0][0].sum()


def test_caches_that_are_cut_from_one_memory(engine):
    """LMDeploy's layers have their caches side by side in one tensor: inputs of one memory that never overlap."""

    def caches() -> list[Any]:
        return [list(one) for one in torch.zeros(2, 2, 2, 4, 2, 4)]

    k, slots = torch.randn(3, 2, 4), torch.tensor([1, 5, 2])
    function = compiled(two_layers)
    expected, mine = caches(), caches()
    with torch.no_grad():
        want = two_layers(k, expected[0], expected[1], slots)
        got = function(k, mine[0], mine[1], slots)
    assert torch.equal(got, want)
    for one, other in zip(mine, expected, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    (made,) = engine.functions
    assert len(made.in_place) == 4
    memory = torch.zeros(4, 2, 4, 2, 4).view(-1)
    halves = [memory[start : start + 64].view(2, 4, 2, 4) for start in (0, 64, 127, 192)]
    inputs = [torch.zeros(3) for _ in made.graph_module.graph.find_nodes(op="placeholder")]
    for index, cache in zip(sorted(made.in_place), halves, strict=True):
        inputs[index] = cache
    assert "share memory" in (made.conflict(inputs) or "")


# --- refusals


def test_inputs_that_share_written_memory_are_told(engine):
    same_as_eager(through_a_slice, tensor(3, 4), tensor(3, 2))
    (function,) = engine.functions
    memory = torch.zeros(20)
    inputs = [memory[:12].view(3, 4), memory[10:16].view(3, 2)]
    inputs = (
        inputs
        if function.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[1] == 4
        else inputs[::-1]
    )
    assert "share memory" in (function.conflict(inputs) or "")
    assert function.conflict([memory[:12].view(3, 4), memory[12:18].view(3, 2)]) is None


def test_a_written_input_whose_elements_share_memory_is_told(engine):
    same_as_eager(through_a_slice, tensor(3, 4), tensor(3, 2))
    (function,) = engine.functions
    sizes = [tuple(one.meta["val"].shape) for one in function.graph_module.graph.find_nodes(op="placeholder")]
    written, other = sizes.index((3, 4)), sizes.index((3, 2))
    for strides, apart in (((1, 3), True), ((4, 1), True), ((5, 1), True), ((0, 1), False), ((2, 1), False)):
        inputs = [torch.zeros(3, 2)] * 2
        inputs[written] = torch.zeros(20).as_strided((3, 4), strides)
        assert (function.conflict(inputs) is None) == apart
    inputs[written], inputs[other] = torch.zeros(3, 4), torch.zeros(2).expand(3, 2)
    assert function.conflict(inputs) is None


def random(x):
    return x + torch.rand_like(x)


def drawn_in_place(x):
    return x.normal_() + 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [(random, "random"), (drawn_in_place, "random")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_has_no_meaning_as_values_is_refused(engine, function, reason):
    same_as_eager(function, tensor(3, 4))
    assert any(reason in text for _, text in last_report().refusals())


def test_a_write_through_a_strided_view_names_its_node(monkeypatch):
    failures = []

    class Recording(ValueEngine):
        def compile(self, region, options):
            try:
                return super().compile(region, options)
            except NotAFunctionError as error:
                failures.append(error)
                return super(ValueEngine, self).compile(region, options)

    use_engine(monkeypatch, Recording())

    def function(x):
        x.diagonal().add_(1)
        return x

    same_as_eager(function, tensor(3, 3))
    (error,) = failures
    assert "aten.diagonal" in str(error)
    assert error.fields["node"] == "diagonal"


# --- any program of views and writes

VIEWS = {
    "t": lambda x: x.t(),
    "slice": lambda x: x[1:],
    "columns": lambda x: x[:, :-1:2],
    "flat": lambda x: x.reshape(-1).unsqueeze(0) if x.is_contiguous() else x.unsqueeze(0)[0],
    "row": lambda x: x[0].unsqueeze(1),
    "half": lambda x: x.chunk(2, 1)[0],
    "last": lambda x: x.split(1, 0)[-1],
    "self": lambda x: x.detach(),
}
WRITE_OPS = {
    "add": lambda x, y: x.add_(y.sum()),
    "scale": lambda x, y: x.mul_(2),
    "copy": lambda x, y: x.copy_(y.mean()),
    "flip": lambda x, y: x.copy_(x.flip(0) + y.max()),
    "mask": lambda x, y: x.masked_fill_(x > y.mean(), 0.5),
    "fill": lambda x, y: x.fill_(3.0),
}


def run_program(program, inputs):
    """Each step sees one of the tensors so far through a view, and may write into that by another tensor."""
    seen = [*inputs, inputs[0] * 0.5]
    for source, view, write, other in program:
        tensor = seen[source % len(seen)]
        if tensor.dim() == 2 and tensor.shape[0] > 1 and tensor.shape[1] > 1:
            tensor = VIEWS[view](tensor)
        if write is not None:
            WRITE_OPS[write](tensor, seen[other % len(seen)])
        seen.append(tensor)
    return tuple(one + 0 if index % 2 else one for index, one in enumerate(seen[2:]))


def strides_that_matter(tensor):
    """A dimension of size 1 is never stepped along; torch's own kernels give it one stride or another."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    found: Any = graph.output_node().args[0]
    return list(found)


steps = st.tuples(
    st.integers(0, 9),
    st.sampled_from(sorted(VIEWS)),
    st.none() | st.sampled_from(sorted(WRITE_OPS)),
    st.integers(0, 9),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, min_size=1, max_size=8))
def test_any_program(program):
    mode = fake_mode.fresh_mode()
    inputs = [tensor(4, 6), tensor(4, 6).flip(0)]
    captured = trace(
        lambda *given: run_program(program, given),
        [mode.from_tensor(one, static_shapes=True) for one in inputs],
        mode,
    )
    owner = captured.graph_module
    nodes = [node for node in owner.graph.nodes if node.op == "call_function"]
    region = extract(owner, nodes, "region")
    run = ValueRun(function_of(region))
    ours, theirs = [one.clone() for one in inputs], [one.clone() for one in inputs]
    by_name = dict(zip(owner.graph.find_nodes(op="placeholder"), ours, strict=True))
    results = dict(zip(region.outputs, run(*(by_name[node] for node in region.inputs)), strict=True))
    seen = [by_name[node] if node in by_name else results[node] for node in outputs_of(owner.graph)]
    expected = list(run_program(program, theirs))
    torch.testing.assert_close(seen, expected)
    assert list(map(strides_that_matter, seen)) == list(map(strides_that_matter, expected))
    torch.testing.assert_close(ours, theirs)
