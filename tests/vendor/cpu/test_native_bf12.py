"""The C++ kernels of matrices in 12 bits: every bit comes back, and results are those of the plain weight, bit for bit.

All numbers of bfloat16 are drawn, NaN among them, and weights whose exceptions stand in every column of a strip.

On a CPU with AMX a plain weight multiplies 3 to 5 rows in tiles, which add the same products in another order. A packed
weight uses no tiles there. The tests compare it with the plain weight two rows at a time, which uses none.
"""

import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.ops.quantised import bf12
from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import linear, needs_compiler, reason_without_tiles, tensor

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


@pytest.fixture(scope="module")
def library() -> None:
    assert native.why_not() is None


def pack(weight: Tensor) -> Tensor:
    return torch.ops.dlinfer_cpu.pack_bf12.default(weight)


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    return torch.ops.dlinfer_cpu.unpack_bf12.default(packed, rows, columns)


def product(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    return torch.ops.dlinfer_cpu.linear_bf12.default(x, packed, bias, rows)


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain weight's product, added in the order in which a packed weight adds."""
    if reason_without_tiles() or not 2 < x.shape[0] <= 5:
        return linear(x, weight, bias)
    return torch.cat([linear(pair, weight, bias) for pair in x.split(2)])


def gated(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    return torch.ops.dlinfer_cpu.linear_bf12_silu_and_mul.default(x, packed, bias, rows)


def rows_of(indices: Tensor, packed: Tensor, rows: int, columns: int) -> Tensor:
    return torch.ops.dlinfer_cpu.embedding_bf12.default(indices, packed, rows, columns)


def bits(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.int16)


def any_numbers(seed: int, rows: int, columns: int) -> Tensor:
    """Of all bit patterns, each as likely, so that most are exceptions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (rows, columns), generator=generator).short().view(torch.bfloat16)


def weight_with_exceptions(seed: int, rows: int, columns: int, one_in: int) -> Tensor:
    """Of a normal distribution, but that about one number in so many is very large, very small or zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * max(columns, 1) ** -0.5
    scales = torch.tensor([2.0**40, 2.0**-60, 0.0, -0.0, 2.0**-125])
    chosen = torch.randint(one_in, (rows, columns), generator=generator) == 0
    which = torch.randint(len(scales), (rows, columns), generator=generator)
    return torch.where(chosen, weight * scales[which], weight).bfloat16()


shapes = st.tuples(st.integers(0, 40), st.one_of(st.integers(0, 300), st.integers(1020, 1300)))


@given(shape=shapes, gap=st.integers(0, 9), every_pattern=st.booleans(), seed=st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_bytes_are_the_formats_and_every_bit_comes_back(shape, gap, every_pattern, seed):
    rows, columns = shape
    size = (rows, columns + gap)
    drawn = any_numbers(seed, *size) if every_pattern else weight_with_exceptions(seed, *size, 50)
    weight = drawn[:, :columns]
    packed = pack(weight)
    assert torch.equal(packed, bf12.pack(weight))
    assert torch.equal(bits(unpack(packed, rows, columns)), bits(weight))
    if rows:
        indices = torch.tensor([[0, rows - 1], [rows // 2, 0]])
        for places in (indices, indices.int(), indices.t(), indices[:0]):
            found = rows_of(places, packed, rows, columns)
            assert torch.equal(bits(found), bits(weight[places.long()]))


@given(
    inputs=st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 32, 33, 65, 129, 300])),
    features=st.integers(0, 40),
    in_features=st.one_of(st.integers(0, 300), st.sampled_from([896, 1024, 1152, 2176])),
    gap=st.integers(0, 9),
    one_in=st.sampled_from([1, 3, 50, 5000]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(1, 1152, 896, 0, 5000, True, 0)
@example(4, 96, 4864, 0, 5000, False, 0)
@example(16, 28, 2176, 0, 5000, True, 0)  # in tiles two sums differ
@settings(max_examples=120, deadline=None)
def test_products_have_the_bits_of_the_plain_weight(
    inputs, features, in_features, gap, one_in, with_bias, seed
):
    x = tensor(seed, (inputs, in_features), torch.bfloat16, gap)
    weight = weight_with_exceptions(seed + 1, 2 * features, in_features, one_in)
    bias = tensor(seed + 2, (2 * features,), torch.bfloat16) if with_bias else None
    packed = pack(weight)
    plain = plain_product(x, weight, bias)
    assert torch.equal(product(x, packed, bias, 2 * features), plain)
    both = torch.ops.dlinfer_cpu.silu_and_mul.default(plain)
    found = gated(x, packed, bias, 2 * features)
    assert found.is_contiguous()
    assert torch.equal(found.isnan(), both.isnan())  # of infinite gates and ups that are zero
    assert torch.equal(found.nan_to_num(7.0), both.nan_to_num(7.0))


@pytest.mark.parametrize("inputs", [1, 4, 5, 40, 300])
def test_nan_and_infinity_stay_in_their_outputs(inputs):
    weight = weight_with_exceptions(0, 24, 256, 5000)
    weight[5, 3], weight[9, 255], weight[10, 128] = torch.nan, torch.inf, -torch.inf
    x = tensor(1, (inputs, 256), torch.bfloat16).abs() + 0.5
    found, plain = product(x, pack(weight), None, 24), plain_product(x, weight)
    assert found[:, 5].isnan().all()
    assert torch.equal(found.nan_to_num(7.0), plain.nan_to_num(7.0))
    assert torch.equal(found.isfinite(), plain.isfinite())


def test_leading_dimensions_and_copies():
    weight = weight_with_exceptions(0, 34, 256, 50)
    packed = pack(weight)
    x, bias = tensor(1, (3, 2, 256), torch.bfloat16), tensor(2, (34, 2), torch.bfloat16)[:, 0]
    for given_x in (x, x.transpose(0, 1), x[0, 0], x[..., :0].new_zeros(2, 0, 256)):
        dense = bias.contiguous()  # of another the plain layer is torch's
        assert torch.equal(product(given_x, packed, bias, 34), linear(given_x, weight, dense))
        assert gated(given_x, packed, bias, 34).shape == (*given_x.shape[:-1], 17)
    turned = weight.t().contiguous().t()
    assert torch.equal(pack(turned), packed)
    assert torch.equal(pack(torch.stack([weight, weight], -1)[..., 0]), packed)


def test_a_packed_matrix_at_an_odd_address():
    weight = weight_with_exceptions(0, 12, 256, 20)
    packed = pack(weight)
    x = tensor(1, (2, 256), torch.bfloat16)
    moved = torch.cat([packed[:3], packed])[3:]
    assert torch.equal(product(x, moved, None, 12), linear(x, weight))
    assert torch.equal(bits(unpack(moved, 12, 256)), bits(weight))


@pytest.mark.parametrize("inputs", [1, 9, 300])
def test_threads_do_not_change_a_bit(inputs):
    weight = weight_with_exceptions(0, 900, 384, 300)
    x = tensor(1, (inputs, 384), torch.bfloat16)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            packed = pack(weight)
            found.append((packed, product(x, packed, None, 900), gated(x, packed, None, 900)))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def experts_of(
    seed: int, experts: int, hidden: int, inner: int, one_in: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The stacks of experts, plain and packed."""
    gate_up = weight_with_exceptions(seed, experts * 2 * inner, hidden, one_in)
    down = weight_with_exceptions(seed + 1, experts * hidden, inner, one_in)
    return [one.unflatten(0, (experts, -1)) for one in (gate_up, down)], [pack(gate_up), pack(down)]


def choices(seed: int, tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    """Weights and ids, one expert much liked."""
    generator = torch.Generator().manual_seed(seed)
    liked = torch.rand(tokens, experts, generator=generator)
    liked[:, experts // 2] += 0.5
    weights, ids = liked.topk(topk)
    return weights, ids


@given(
    tokens=st.one_of(st.integers(0, 12), st.sampled_from([40, 300, 700])),
    experts=st.integers(1, 7),
    hidden=st.sampled_from([4, 64, 128, 132, 896]),
    inner=st.sampled_from([4, 36, 128, 384]),
    topk=st.integers(1, 3),
    renormalize=st.booleans(),
    one_in=st.sampled_from([10, 5000]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_experts_have_the_bits_of_plain_weights(
    tokens, experts, hidden, inner, topk, renormalize, one_in, seed
):
    plain, packed = experts_of(seed, experts, hidden, inner, one_in)
    x = tensor(seed + 2, (tokens, hidden), torch.bfloat16, 5)
    weights, ids = choices(seed + 3, tokens, experts, min(topk, experts))
    want = torch.ops.dlinfer_cpu.fused_moe.default(x, *plain, weights, ids, renormalize)
    mixture = torch.ops.dlinfer_cpu.fused_moe_bf12.default
    got = mixture(x, *packed, weights, ids, renormalize, experts, inner)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_experts_that_are_refused():
    _, packed = experts_of(0, 3, 128, 64, 50)
    x, (weights, ids) = tensor(1, (4, 128), torch.bfloat16), choices(2, 4, 3, 2)
    mixture = torch.ops.dlinfer_cpu.fused_moe_bf12.default
    with pytest.raises(RuntimeError, match="multiples of 4"):
        mixture(x[:, :126], *packed, weights, ids, True, 3, 64)
    with pytest.raises(RuntimeError, match="no packed matrix of"):
        mixture(x, *packed, weights, ids, True, 4, 64)
    with pytest.raises(RuntimeError, match="fused_moe_bf12"):
        mixture(x, *packed, weights, ids + 1, True, 3, 64)
    with pytest.raises(RuntimeError, match="bfloat16 tensor"):
        mixture(x.float(), *packed, weights, ids, True, 3, 64)


class TestRefusals:
    """A matrix of other sizes, or one that is damaged, is refused; nothing is read beyond its bytes."""

    weight = weight_with_exceptions(0, 8, 256, 20)
    x = torch.ones(2, 256, dtype=torch.bfloat16)

    def test_sizes(self):
        packed = pack(self.weight)
        for x, rows in ((self.x, 12), (self.x, 4), (self.x[:, :128], 8), (self.x, -1)):
            with pytest.raises(RuntimeError, match="no packed matrix of"):
                product(x, packed, None, rows)
        with pytest.raises(RuntimeError, match="no packed matrix of"):
            product(self.x, packed[:-8], None, 8)
        with pytest.raises(RuntimeError, match="no packed matrix of"):
            unpack(packed, 8, 512)

    def test_dtypes(self):
        packed = pack(self.weight)
        with pytest.raises(RuntimeError, match="x is a bfloat16"):
            product(self.x.float(), packed, None, 8)
        with pytest.raises(RuntimeError, match="uint8"):
            product(self.x, packed.to(torch.int32), None, 8)
        with pytest.raises(RuntimeError, match="bias is"):
            product(self.x, packed, torch.ones(7, dtype=torch.bfloat16), 8)
        with pytest.raises(RuntimeError, match="bfloat16"):
            pack(self.weight.float())
        with pytest.raises(RuntimeError, match="2 \\* intermediate"):
            gated(self.x, pack(self.weight[:7]), None, 7)

    def test_indices(self):
        packed = pack(self.weight)
        for index in (-1, 8):
            with pytest.raises(RuntimeError, match=f"out of range in self: {index} of 8 rows"):
                rows_of(torch.tensor([0, index]), packed, 8, 256)
        with pytest.raises(RuntimeError, match="int64 or int32"):
            rows_of(torch.tensor([0.0]), packed, 8, 256)

    @pytest.mark.parametrize("inputs", [1, 40])
    def test_damage(self, inputs):
        x = torch.ones(inputs, 256, dtype=torch.bfloat16)
        behind = 2 * 2 * 4 * 192  # numbers of 8 rows
        for place, value in ((0, 250), (0, -1), (3, 0), (2, 2**40), (2, -1)):
            packed = pack(self.weight)
            packed[behind:].view(torch.int64)[place] = value
            with pytest.raises(RuntimeError, match="packed matrix"):
                product(x, packed, None, 8)
        packed = pack(self.weight)
        packed[behind:].view(torch.int64)[4:] = 2**40 << 18  # columns that there are none of
        product(x, packed, None, 8)
        unpack(packed, 8, 256)
        packed[behind:].view(torch.int64)[4:] = -1
        product(x, packed, None, 8)
        unpack(packed, 8, 256)

    @pytest.mark.parametrize("inputs", [1, 40])
    def test_exceptions_out_of_order(self, inputs):
        """Each is written beside a column that is known by then: one that lies before it would be outside."""
        columns, x = 2048, torch.ones(inputs, 2048, dtype=torch.bfloat16)
        weight = torch.ones(4, columns, dtype=torch.bfloat16)
        weight[1, 1100], weight[2, 1200] = 2.0**60, 2.0**60
        packed = pack(weight)
        entries = packed[-16:].view(torch.int64)
        entries[1] = 3 << 18
        for call in (lambda: product(x, packed, None, 4), lambda: unpack(packed, 4, columns)):
            with pytest.raises(RuntimeError, match="packed matrix is damaged"):
                call()

    def test_damaged_experts_end_a_call_of_two_threads(self):
        """Whoever finds the damage leaves activations undone that the other thread would wait for.

        In a process of its own, as a call that waits for ever cannot be ended.
        """
        code = """
import torch
from dlinfer.vendor.cpu import native
assert native.why_not() is None
torch.set_num_threads(2)
experts, size = 4, 1024
pack, mixture = torch.ops.dlinfer_cpu.pack_bf12, torch.ops.dlinfer_cpu.fused_moe_bf12
gate_up, down = (pack(torch.randn(experts * rows, size).bfloat16()) for rows in (2 * size, size))
given = torch.ones(1, size).bfloat16(), gate_up, down, torch.ones(1, 2) / 2, torch.tensor([[0, 2]])
mixture(*given, False, experts, size)
behind = 2 * experts * size * size // 128 * 192
strips = 2 * size // 4  # of an expert; the middle of the last that is chosen, where both threads are at work
gate_up[behind:].view(torch.int64)[1 + 2 * strips + strips // 4] = -5
for _ in range(30):
    try:
        mixture(*given, False, experts, size)
    except RuntimeError as error:
        assert "packed matrix is damaged" in str(error)
    else:
        raise AssertionError("nobody saw it")
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


RESIDENT = """
import torch
from dlinfer.vendor.cpu import native
from tests.resident import resident

assert native.why_not() is None
weight = torch.randn(4864, 896).bfloat16()
packed = [torch.ops.dlinfer_cpu.pack_bf12(weight)]
before = resident()
packed += [torch.ops.dlinfer_cpu.pack_bf12(weight) for _ in range(16)]
print(resident() - before, sum(one.nbytes for one in packed[1:]))
"""


def test_packed_weights_lie_side_by_side() -> None:
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    resident, packed = map(int, done.stdout.split())
    assert 16 * 6.2e6 < packed < 16 * 6.6e6
    assert resident < 1.06 * packed, "each in huge pages of its own would be 1.3"
