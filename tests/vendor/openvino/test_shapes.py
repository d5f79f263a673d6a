"""Views, joins and parts, with one compilation for all sizes; conversions and tensors made of sizes."""

import pytest
import torch
import torch.nn.functional as F

from tests.graph.compiling import compiled
from tests.vendor.openvino.lowering import TOLERANCE, lowered, same

x = torch.randn(3, 5, 8)
others = ((torch.randn(2, 5, 8),), (torch.randn(7, 9, 8),), (torch.randn(1, 1, 8),))

VIEWS = {
    "split heads": lambda a: a.view(a.shape[0], a.shape[1], 2, 4).transpose(1, 2).contiguous(),
    "merge heads": lambda a: a.transpose(1, 2).reshape(a.shape[0], -1),
    "all in one": lambda a: a.reshape(-1) * 1,
    "two unknown": lambda a: a.reshape(a.shape[1], a.shape[0] * 8) * 1,
    "flatten": lambda a: (a.flatten(0, 1) * 1, a.flatten() * 1, a.flatten(1) * 1),
    "unflatten": lambda a: a.unflatten(-1, (2, 4)) * 1,
    "unsqueeze": lambda a: (a.unsqueeze(0) * 1, a.unsqueeze(-1) * 1, a.unsqueeze(1).squeeze(1) * 1),
    "permute": lambda a: (a.permute(2, 0, 1) * 1, a.movedim(0, -1) * 1, a.mT * 1, a.swapaxes(0, 2) * 1),
    "expand": lambda a: (a.unsqueeze(1).expand(-1, 4, -1, -1) * 1, a[:1].expand(6, -1, -1) * 1),
    "expand to another's size": lambda a: a[:1, :1].expand_as(a) * 1,
    "repeat": lambda a: (a.repeat(2, 1, 1), a.repeat(2, 1, 1, 3), a.repeat_interleave(3, 1), a.repeat_interleave(2)),
    "cat": lambda a: (torch.cat([a, a[:, :2]], 1), torch.cat([a, a.int()], -1), torch.stack([a, a], 1)),
    "flip": lambda a: (a.flip(0), a.flip(1, 2), a.roll(2, 0), a.roll((1, -2), (0, 1)), a.roll(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    same(VIEWS[name], x, others=others[:2])


PARTS = {
    "slices": lambda a: (a[1:], a[:, :-1], a[:, -2:], a[..., ::3], a[..., 1:7:2], a[0:0], a[:, 100:], a[:, -100:2]),
    "selects": lambda a: (a[0] * 1, a[:, -1] * 1, a[..., 3] * 1, a[-1, -1, -1] * 1),
    "narrow": lambda a: (a.narrow(2, 1, 4) * 1, a.narrow(2, -3, 2) * 1),
    "sizes": lambda a: (a[: a.shape[0] - 1] * 1, a[:, a.shape[1] // 2 :] * 1),
    "chunks": lambda a: [part * 1 for part in (*a.chunk(4, -1), *a.split(3, -1), *a.split([1, 2, 5], -1))],
    "unbind": lambda a: [part * 1 for part in a.unbind(-1)],
    "triangles": lambda a: (a.tril(), a.triu(), a.tril(-1), a.triu(2), (a > 0).tril(), a.long().triu()),
    "windows": lambda a: (a.unfold(-1, 3, 2) * 1, a.unfold(-1, 8, 1) * 1),
    "diagonal": lambda a: (a.diagonal() * 1, a.diagonal(1, 1, 2) * 1, a.diagonal(-1, 2, 0) * 1),
    "pad": lambda a: (F.pad(a, (1, 2)), F.pad(a, (-1, 0, 2, 1), value=3.0), F.pad(a, (2, 1), mode="reflect")),
    "replicate": lambda a: F.pad(a, (2, 1), mode="replicate"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    same(PARTS[name], x, others=others[:2])


def test_parts_that_differ_by_one():
    """Which parts are longer is assumed by the capture: the sizes leave the same remainder."""

    def parts(a):
        return [part * 1 for part in (*a.tensor_split(2), *a.tensor_split(3, -1))]

    same(parts, torch.randn(5, 8), others=[[torch.randn(*sizes)] for sizes in ((3, 5), (9, 11), (7, 2))])


def test_parts_of_a_size_that_varies():
    same(lambda a: [part * 1 for part in a.chunk(2, 0)], torch.randn(6, 4), others=[(torch.randn(5, 4),)])
    same(
        lambda a, n: (a[:, :n] * 1, a[:, n:] * 1, a[-n:] * 1),
        torch.randn(6, 8),
        3,
        others=[(torch.randn(9, 8), 5)],
    )


MADE = {
    "arange": lambda a: (
        torch.arange(a.shape[0]),
        torch.arange(1, a.shape[1]),
        torch.arange(0, a.shape[0], 2),
    ),
    "arange of floats": lambda a: torch.arange(a.shape[0], dtype=torch.float32),
    "falling": lambda a: torch.arange(a.shape[0], -2, -1),
    "full": lambda a: (torch.full((a.shape[0], 2), -1e9), torch.zeros(a.shape[1]), torch.ones(3, a.shape[0])),
    "like": lambda a: (torch.zeros_like(a), torch.ones_like(a, dtype=torch.int64), torch.full_like(a, 2.5)),
    "new": lambda a: (
        a.new_zeros(2, a.shape[0]),
        a.new_full((3,), 7),
        a.new_ones(a.shape[1], dtype=torch.bool),
    ),
    "eye": lambda a: (torch.eye(a.shape[0]), torch.eye(3, a.shape[1])),
    "linspace": lambda a: torch.linspace(-1, 1, 7) * a.sum(),
    "causal mask": lambda a: torch.full((a.shape[1], a.shape[1]), float("-inf")).triu(1),
    "one hot": lambda a: F.one_hot(torch.arange(a.shape[0]) % 4, 4),
}


@pytest.mark.parametrize("name", MADE)
def test_made_of_sizes(name):
    same(lambda a: (a * 1, MADE[name](a)), x, others=others[:2])


@pytest.mark.parametrize(
    "to",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.int8,
        torch.bool,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_conversions(dtype, to):
    values = torch.tensor([0.0, 1.0, 2.5, 3.9, 100.0] + ([-1.5, -100.0] if to != torch.uint8 else [])).to(
        dtype
    )
    # OpenVINO leaves out a rounding to 16 bits between two conversions where it computes in float32.
    allowed = TOLERANCE.get(to, 0.0) if dtype.is_floating_point else 0.0
    same(lambda a: (a.to(to), a.to(to).to(dtype)), values, rtol=allowed, atol=allowed)


def test_nothing_but_an_input_is_given_back_as_its_values():
    """The CPU plugin leaves such an output unwritten where its sizes are fixed."""
    for one in (torch.randn(1), torch.tensor(2.0), torch.randn(3, 4)):
        same(lambda a: (a.clone(), a.float().clone(), torch.cat([a.view(-1)]).clone()), one)
        same(lambda a: a.clone(), one)


def test_empty_tensors():
    compiled, _ = lowered(
        lambda a: (torch.cat([a, a]), a * 2, a.sum(1), a @ a.t(), a.view(-1, 2), a.softmax(1)), x[0]
    )
    for rows in (0, 1, 3):
        a = torch.randn(rows, 8)
        expected = torch.cat([a, a]), a * 2, a.sum(1), a @ a.t(), a.view(-1, 2), a.softmax(1)
        for one, other in zip(compiled(a), expected, strict=True):
            torch.testing.assert_close(one, other)
    same(lambda a: (torch.cat([torch.empty(0), a]), a[:, :0].sum(1)), x[0])


def test_arithmetic_on_sizes():
    def sizes(a, n):
        rows = (a.shape[0] * 3 + n) // 7, (a.shape[1] - n) % 5, -n + 2 * a.shape[0], max(n, a.shape[0]), n**2
        return [a.new_ones(()) * row for row in rows]

    same(sizes, torch.randn(4, 6), 3, others=[(torch.randn(9, 7), 5)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.ones_like(x) * 2,
        lambda x: torch.full((x.shape[0], 2), 1.0) + 1.5,
        lambda x: x**0 * 2,
        lambda x: x.clone().copy_(torch.ones(2)[0]) + 2,
    ],
    ids=["ones", "full", "power", "copy"],
)
def test_filled_tensors_without_rows_keep_their_sizes(function):
    run = compiled(function, engine="openvino", fallback="error", small_regions="engine", dynamic=True)
    for rows in (0, 3, 1):
        x = torch.zeros(rows, 2)
        torch.testing.assert_close(run(x), function(x))
