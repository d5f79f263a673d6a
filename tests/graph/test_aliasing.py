"""Tensors that share memory and writes in place: whatever eager lets a caller see, compiled code does too."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.graph.compiling import (
    StubEngine,
    compiled,
    interpreted_engine,
    same_as_eager,
    use_engine,
)

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(autouse=True, params=["stub", "stub without mul", "inductor, interpreted"])
def engine(request, monkeypatch):
    """With a refused op, the regions must keep the order of reads and writes too."""
    chosen = {
        "stub": StubEngine,
        "stub without mul": lambda: StubEngine(refused=["aten.mul.Tensor"]),
        "inductor, interpreted": lambda: interpreted_engine(monkeypatch),
    }[request.param]()
    use_engine(monkeypatch, chosen)
    return chosen


def grid(*sizes: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(sizes).numel()).reshape(sizes)


def returns_input(x):
    return x, x.view(-1), x[1:], x.t(), x * 2 + 1


def equal_results(x):
    a, b = x * 2 + 1, x * 2 + 1
    return a, b


def equal_results_as_views(x):
    a, b = x * 2 + 1, x * 2 + 1
    return a.view(-1), b.view(-1)


def equal_results_one_written(x):
    a, b = x * 2 + 1, x * 2 + 1
    a.add_(1)
    return a * 3, b * 3


def copies(x):
    a = x.sin() + 1
    return a, a.clone(), x.clone(), x.contiguous(), x.to(torch.float32), x.detach()


def adds_nothing(x):
    return x + torch.zeros(4, 6), x * torch.ones(4, 6), x.clone() + 0


def constant_written(x):
    t = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    t.add_(x[0])
    return x + t, t


def constants_returned(x):
    return torch.tensor([1.0, 2.0]), torch.zeros(3), torch.ones(3) * 2 + 1, torch.full((2,), 3.0)


def input_written(x):
    before = x * 2 + 1
    x.add_(10)
    after = x * 2 + 1
    x[0].mul_(3)
    return before, after, x.sum()


def input_written_and_returned(x):
    x.mul_(2)
    return x


def input_transposed_in_place(x):
    x.t_()
    return x * 2 + 1


def input_copied_over(x):
    x.copy_(x.flip(0) + 1)
    return x * 2


def view_of_intermediate_written(x):
    y = x * 2 + 1
    row, flat = y[1], y.view(-1)
    row.zero_()
    early = flat.sum() + y.sum()
    flat[3:9].add_(5)
    return early, y * 2, row + 1


def indexed_writes(x):
    y = x.clone()
    y[:, 1::2] = 0
    y[0] += 2
    y.index_add_(0, torch.tensor([1, 1]), x[:2])
    z = y.masked_fill_(y > 5, 1.5)
    return z * 2, y + 1


def read_between_writes(x):
    total = x.sum() * 2
    x.add_(1)
    total = total + x.sum() * 2
    x.sub_(4)
    return total + x.sum() * 2, x.amax() * 2


def reshaped_in_place(x):
    y = x * 2
    flat = y.view(-1)
    y.t_()
    return torch.mm(y, x), flat.view(4, 6) + x, flat.sin() + 1


def alias_reshaped_in_place(x):
    y, z = x.view(4, 6), x.view(4, 6)
    y.unsqueeze_(0)
    z.t_()
    return y + 1, z * 2, x * 3


def into_out_argument(x):
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    return y * 2


def dropout_outside_training(x):
    y = F.dropout(x, 0.5, training=False)
    y.add_(1)
    total = x.sum() * 2
    y.mul_(3)
    return total + x.sum() * 2, F.dropout(x, 0.5, False), F.alpha_dropout(x, 0.5), torch.dropout(x, 0.0, True)


def swapped(x):
    a, b = x[:2], x[2:]
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return x * 2 + 1


ONE_INPUT = [
    returns_input, equal_results, equal_results_as_views, equal_results_one_written, copies, adds_nothing,
    constant_written, constants_returned, input_written, input_written_and_returned, input_transposed_in_place,
    input_copied_over, view_of_intermediate_written, indexed_writes, read_between_writes, reshaped_in_place,
    alias_reshaped_in_place, into_out_argument, dropout_outside_training, swapped,
]  # fmt: skip


@pytest.mark.parametrize("function", ONE_INPUT, ids=lambda function: function.__name__)
def test_one_input(function):
    calls = 1 if function is input_transposed_in_place else 2  # a second call meets other sizes
    same_as_eager(function, grid(4, 6), calls=calls, small_regions="engine")


def second_from_first(a, b):
    before = b * 2 + 1
    a.add_(10)
    return before, b * 2 + 1, (a * b).sum()


def both_written(a, b):
    a.mul_(2)
    b.add_(a.sum())
    return a * 2 + 1, b * 2 + 1


def pairs(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    base = grid(12)
    return {
        "apart": lambda: (grid(6), grid(6) * 3),
        "the same twice": lambda: (base[:6],) * 2,
        "equal views": lambda: (base[:6], base[:6]),
        "overlapping": lambda: (base[:6], base[3:9]),
        "disjoint of one memory": lambda: (base[:6], base[6:]),
    }[kind]()


KINDS = ["apart", "the same twice", "equal views", "overlapping", "disjoint of one memory"]


@pytest.mark.parametrize(
    "function", [second_from_first, both_written], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("first", KINDS)
def test_two_inputs_that_share_memory_at_some_calls(function, first):
    run = compiled(function, small_regions="engine")
    for kind in [first, *KINDS]:
        given = pairs(kind)
        ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
        with torch.no_grad():
            expected = function(*theirs)
            torch.testing.assert_close(run(*ours), expected)
        torch.testing.assert_close(ours, theirs)


class FedBack(nn.Module):
    """Reads its argument before it writes a buffer, of which it gives a view."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor
        self.register_buffer("state", torch.zeros(4, 6))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = h.sin() + h.cos()
        self.state.copy_(torch.cumsum(x, 0))
        return y * 2, self.state[:]


class WritesItsArgument(nn.Module):
    """Reads a parameter before it writes its argument, which may be the parameter's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(grid(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight.sin() + self.weight.cos()
        x.add_(torch.cumsum(x, 0))
        return y * 2 + self.weight


class Exchanged(nn.Module):
    """Reads one buffer before it writes the other; a caller may let one be a view of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one: torch.Tensor
        self.other: torch.Tensor
        self.register_buffer("one", grid(4, 6))
        self.register_buffer("other", grid(4, 6) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one.sin() + self.one.cos()
        self.other.add_(torch.cumsum(x, 0))
        return y * 2 + self.one


def test_a_view_of_a_buffer_is_fed_back():
    ours, theirs = FedBack(), FedBack()
    run = compiled(ours, small_regions="engine")
    h = expected_h = grid(4, 6)
    with torch.no_grad():
        for call in range(3):
            given, h = run(grid(4, 6) / (call + 1), h)
            expected, expected_h = theirs(grid(4, 6) / (call + 1), expected_h)
            torch.testing.assert_close((given, h), (expected, expected_h))


@pytest.mark.parametrize(
    "view", [lambda w: w[:], lambda w: w.t().t(), lambda w: w.as_strided((4, 6), (6, 1))]
)
def test_an_argument_that_is_written_is_a_parameters_memory_at_one_call(view):
    ours, theirs = WritesItsArgument(), WritesItsArgument()
    run = compiled(ours, small_regions="engine")
    with torch.no_grad():
        for own in (True, False, True):
            given, expected = (grid(4, 6) if own else view(one.weight.data) for one in (ours, theirs))
            torch.testing.assert_close(run(given), theirs(expected))
            torch.testing.assert_close(ours.weight, theirs.weight)


def test_a_buffer_becomes_a_view_of_another():
    ours, theirs = Exchanged(), Exchanged()
    run = compiled(ours, small_regions="engine")
    with torch.no_grad():
        for call in range(3):
            if call:
                ours.one, theirs.one = ours.other[:], theirs.other[:]
            torch.testing.assert_close(run(grid(4, 6)), theirs(grid(4, 6)))


def complex_seen_as_real(a, b):
    before = a.abs() + 1
    b.add_(1)
    return before * 2, a.abs()


def test_numbers_seen_as_others():
    run = compiled(complex_seen_as_real, small_regions="engine")
    ours, theirs = (torch.complex(grid(6), grid(6) + 6) for _ in range(2))
    with torch.no_grad():
        for call in range(2):
            second = [torch.view_as_real(one) if call else grid(6, 2) for one in (ours, theirs)]
            torch.testing.assert_close(run(ours, second[0]), complex_seen_as_real(theirs, second[1]))
    torch.testing.assert_close(ours, theirs)


def branches_that_write(flag, x):
    def adds(x):
        x.add_(1)
        return x.sum()

    def doubles(x):
        x.mul_(2)
        return x.sum()

    before = x.sin() + x.cos()
    total = torch.cond(flag, adds, doubles, (x,))
    return before * 2, total, x * 3 + 1


@pytest.mark.parametrize("flag", [True, False])
def test_branches_that_write(flag):
    same_as_eager(branches_that_write, torch.tensor(flag), grid(4, 6), small_regions="engine")


class Cached(nn.Module):
    """Writes a row of a buffer and reads all of it, as a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: torch.Tensor
        self.register_buffer("cache", torch.zeros(8, 6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        before = self.cache.sum()
        self.cache.index_copy_(0, position, self.linear(x))
        return self.cache * 2 + before


def test_buffer_is_written_in_place():
    model = Cached()
    same_as_eager(model, grid(2, 6), torch.tensor([1, 5]), calls=3)
    address = model.cache.data_ptr()
    with torch.no_grad():
        compiled(model)(grid(2, 6), torch.tensor([1, 5]))
    assert model.cache.data_ptr() == address
    assert model.cache[5].abs().sum() > 0


def test_tied_parameters():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 6)
            self.head = nn.Linear(6, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.embed.weight.add_(1)
            return self.head(self.embed(tokens) * 2)

    same_as_eager(Tied(), torch.tensor([1, 2, 6]))


def draws(x):
    a = torch.rand(3)
    b = F.dropout(x, 0.5, training=True) + torch.randn(6)
    c = torch.empty(4).uniform_() + torch.randint(0, 9, (4,))
    torch.rand(2)  # unused, but it moves the generator
    return a * 2, b, c, torch.bernoulli(torch.full((5,), 0.5)), torch.rand_like(x), torch.randperm(5)


def test_random_ops_draw_as_eager_does():
    same_as_eager(draws, grid(4, 6), calls=3)


class Training(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.alpha = nn.AlphaDropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.alpha(self.dropout(self.norm(x)) * 2 + 1)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_batch_norm(training):
    same_as_eager(Training().train(training), grid(4, 6), calls=3)


def test_attention_with_dropout_draws_as_eager_does():
    q = grid(1, 2, 4, 8) / 100
    same_as_eager(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5) * 2, q)
