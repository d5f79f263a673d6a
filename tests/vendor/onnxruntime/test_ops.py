"""Ops of every topic through a session, with symbolic sizes, against eager; one session for all sizes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from dlinfer import ops
from dlinfer.ops.core.samples import SampleMaker
from tests.vendor.onnxruntime.regions import as_in_eager, compiled, refused, subgraph

torch.manual_seed(0)


def x(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes)


def whole(*sizes: int) -> torch.Tensor:
    return torch.randint(-9, 9, sizes)


TOPICS = {
    "promotion of dtypes": (lambda a, b: (a + b, a * 0.5, a > 0.5, torch.where(a > b, a, b)), whole, x),
    "arithmetic": (lambda a, b: (a - 2 * b, a / b, a**2, (-a).abs(), torch.rsqrt(b * b)), x, x),
    "division of whole numbers": (
        lambda a, b: (a // 3, a % 3, torch.div(a, 2, rounding_mode="trunc"), a / 2),
        whole,
        x,
    ),
    "rounding": (lambda a, b: (a.round(), a.floor(), a.ceil(), a.trunc(), a.frac()), x, x),
    "comparisons and logic": (lambda a, b: ((a > b) & (a < 1) | ~(b == 0), a.isnan(), a.sign()), x, x),
    "activations": (
        lambda a, b: (F.silu(a), F.gelu(a), F.gelu(a, approximate="tanh"), F.relu(b), F.softplus(a), a.erf()),
        x,
        x,
    ),
    "reductions": (
        lambda a, b: (a.sum(), a.mean(-1), a.var(-1), a.amax(0), a.amin((0, 1)), b.prod(1), a.std()),
        x,
        x,
    ),
    "extremes of all dimensions": (lambda a, b: (a.amax(), a.amin(), a.max(), a.min(), a.argmax()), x, x),
    "any and all": (lambda a, b: ((a > 0).any(), (a > 0).all(-1), (a > 5).any(0)), x, x),
    "norms": (
        lambda a, b: (F.layer_norm(a, (8,)), F.softmax(a, -1), F.log_softmax(a, 0), F.normalize(a, dim=-1)),
        x,
        x,
    ),
    "shapes": (
        lambda a, b: (
            a.view(-1, 2, 4).transpose(0, 1) + 1,
            a.unsqueeze(0).expand(3, -1, -1) * 1,
            a.flip(0),
            a.roll(1, 0),
            a[1:, ::2] + 0,
            a.repeat(2, 1),
            *(a.squeeze(0) * 2, a[:1].squeeze(0) * 2, a.squeeze((0, 1)) * 2),
        ),
        x,
        x,
    ),
    "joining and splitting": (
        lambda a, b: (torch.cat((a, b)), torch.stack((a, b), 1), *a.chunk(2, -1), *b.split([3, 5], -1)),
        x,
        x,
    ),
    "products": (lambda a, b: (a @ b.t(), torch.einsum("ij,kj->ik", a, b), torch.outer(a[0], b[0])), x, x),
    "choosing": (
        lambda a, b: (*a.topk(3, -1), *a.sort(-1), a.argsort(0), a.cumsum(0), torch.tril(a), a.clamp(-1, 1)),
        x,
        x,
    ),
    "making": (
        lambda a, b: (
            torch.arange(a.shape[0]) + 1,
            torch.zeros_like(a) + a.shape[0],
            a.new_full((2, 2), 3.0),
            torch.ones(a.shape[0]),
        ),
        x,
        x,
    ),
    "masks": (lambda a, b: (a.masked_fill(b > 0, -1e9), torch.where(b > 0, a, 0.0), a.nan_to_num()), x, x),
}


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic(topic):
    function, *makers = TOPICS[topic]
    first = [make(5, 8) for make in makers]
    run = compiled(function, *first, static=()).run
    for rows in (5, 3, 7):
        as_in_eager(run, function, *(make(rows, 8) for make in makers), tolerance=1e-4)


def test_indices():
    def function(table, ids, at):
        return (
            F.embedding(ids, table),
            table[at],
            table.index_select(0, at),
            table.gather(1, ids[:, :8]),
            table.index_copy(0, at, table[at] * 2),
            table.index_add(0, at, table[at]),
            table.scatter(1, ids[:, :8], 0.0),
        )

    run = compiled(function, x(9, 8), torch.randint(8, (9, 8)), torch.tensor([1, 4, 3])).run
    for rows in (9, 11):
        as_in_eager(run, function, x(rows, 8), torch.randint(8, (rows, 8)), torch.tensor([0, 2, 5, 7]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.bool])
def test_dtypes_go_in_and_out(dtype):
    def function(a, b):
        return torch.cat((a, b)).flip(0), torch.where(a == b, a, b)

    values = [(x(5, 4) * 3).to(dtype), (x(5, 4) * 3).to(dtype)]
    as_in_eager(compiled(function, *values).run, function, *values)


def test_casts_between_dtypes():
    def function(a):
        return (
            a.to(torch.int32),
            a.to(torch.float64),
            a.to(torch.bool),
            (a > 0).to(torch.float32),
            a.half().float(),
        )

    as_in_eager(compiled(function, x(5, 4) * 3).run, function, x(6, 4) * 3)


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (4, 0)])
def test_empty_and_single_sizes(shape):
    def function(a):
        summed = a.shape[-1] > 0  # products over nothing are torch's (test_empty_operands)
        return torch.cat((a, a)) * 2, a @ a.t() if summed else a.t() @ a, F.softmax(a, -1)

    as_in_eager(compiled(function, x(*shape), fixed=True).run, function, x(*shape))


def test_scalars_in_and_out():
    def function(a, b):
        return a + b, a * 2

    as_in_eager(
        compiled(function, torch.tensor(3), torch.tensor(1.5)).run,
        function,
        torch.tensor(4),
        torch.tensor(0.5),
    )


def test_results_that_are_inputs_views_or_one_memory():
    def function(a, b):
        total = a + b
        return a, a[1:], total, total.view(-1), total

    first, second = x(4, 6), x(4, 6)
    given = compiled(function, first, second).run(first, second)
    assert given[0] is first or given[0].data_ptr() == first.data_ptr()
    assert given[1].data_ptr() == first[1:].data_ptr()
    assert given[2].data_ptr() == given[3].data_ptr() == given[4].data_ptr()
    torch.testing.assert_close(given[2], first + second)


def test_a_region_of_views_alone_needs_no_session():
    def function(a):
        return a.t(), a[1:]

    value = x(4, 6)
    given = compiled(function, value).run(value)
    assert given[0].data_ptr() == value.data_ptr()
    assert torch.equal(given[1], value[1:])


# --- attention


MASKS = ("none", "causal", "bool", "float", "per head")


@pytest.mark.parametrize(
    ("heads", "mask"), [(2, "causal"), (2, "float"), (2, "per head"), (4, "bool"), (4, "none"), (1, "bool")]
)
def test_attention(heads, mask):
    attends(heads, mask)


@pytest.mark.full
@pytest.mark.parametrize("heads", [4, 2, 1], ids=lambda heads: f"{heads} KV heads")
@pytest.mark.parametrize("mask", MASKS)
def test_attention_of_any_group_with_any_mask(heads, mask):
    attends(heads, mask)


def attends(heads: int, mask: str) -> None:
    """4 query heads over these KV heads, for several batches and lengths; torch needs a second to trace it."""

    def function(q, k, v, m):
        given: dict[str, Any] = (
            {} if mask == "none" else {"is_causal": True} if mask == "causal" else {"attn_mask": m}
        )
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=heads < 4, **given)

    def inputs(batch, length):
        shape = (batch, 4 if mask == "per head" else 1, length, length)
        seen = torch.rand(shape) > 0.3
        seen[..., 0, :] = False  # a query that sees nothing gives zeros
        m = torch.zeros(shape).masked_fill(~seen, -torch.inf) if mask == "float" else seen
        return x(batch, 4, length, 16), x(batch, heads, length, 16), x(batch, heads, length, 12), m

    run = compiled(function, *inputs(3, 5), numbers=(1, 2, 4, 12, 16)).run
    for batch, length in ((3, 5), (2, 9)):
        as_in_eager(run, function, *inputs(batch, length))


def test_attention_of_one_token_over_a_longer_cache():
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)

    inputs = x(3, 4, 1, 16), x(3, 2, 9, 16), x(3, 2, 9, 16)
    as_in_eager(compiled(function, *inputs, numbers=(2, 4, 16)).run, function, *inputs)


# --- dlinfer's ops


SERVED = (
    "rms_norm add_rms_norm silu_and_mul silu_mul gelu_mul linear linears apply_rotary_pos_emb"
    " apply_rotary_pos_emb_interleaved moe_gating_topk_softmax fused_moe"
).split()


NO_KERNEL = {("gelu_mul", torch.float64)}
"""What some calls need and ONNX Runtime's CPU provider has not: Erf of float64."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", SERVED)
def test_an_op_of_dlinfer_with_its_own_samples(name, dtype):
    """Every sample of the op, within twice its tolerance of the reference in float64, relative to the
    largest value: the tolerance is that of one kernel, here several follow each other."""
    op = ops.registry()[name]
    for sample in op.sample_inputs(SampleMaker(dtype=dtype)):
        leaves, spec = pytree.tree_flatten(sample.args)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(*tensors, leaves=leaves, places=places, spec=spec):
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            return op.overload(*pytree.tree_unflatten(given, spec))

        tensors = [leaves[place] for place in places]
        reasons = refused(subgraph(call, *tensors, fixed=True))
        if reasons and all("without elements" in reason for reason in reasons.values()):
            continue
        if reasons:
            assert (name, dtype) in NO_KERNEL, reasons
            assert "Could not find an implementation" in str(reasons)
            continue
        given = compiled(call, *tensors, fixed=True).run(*tensors)
        wide = [
            leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
            for leaf in leaves
        ]
        expected = pytree.tree_leaves(op.reference(*pytree.tree_unflatten(wide, spec)))
        tolerance = op.tolerances.get(dtype) or op.tolerances[torch.float32]
        for value, want in zip(given, expected, strict=True):
            torch.testing.assert_close(
                value.to(want.dtype),
                want,
                rtol=2 * tolerance.rtol,
                atol=2 * tolerance.atol * max(1.0, float(want.abs().max()) if want.numel() else 0.0),
                msg=lambda text, sample=sample: f"{sample.name}: {text}",
            )
