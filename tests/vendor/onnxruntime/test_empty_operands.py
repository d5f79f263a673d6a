"""Tensors without elements: what ONNX Runtime is not right for is left to torch, and says so."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.report import report
from dlinfer.graph.torch_private.dynamo import mark_unbacked
from tests.torch_releases import IS_2_12
from tests.vendor.onnxruntime.regions import as_in_eager, compiled, refused, subgraph

ALWAYS = {
    "mean of a cast": (lambda x: (x > 0).float().mean(), (0, 4)),
    "std": (lambda x: x.std(0, unbiased=False), (0, 4)),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), (3, 0)),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), (3, 0)),
    "sum": (lambda x: x.sum(0), (0, 4)),
    "experts": (
        lambda x: torch.ops.dlinfer.fused_moe(
            x, torch.ones(4, 6, 4), torch.ones(4, 4, 3), torch.ones(0, 2), torch.zeros(0, 2).long(), 2, False
        ),
        (0, 4),
    ),
    "matmul": (lambda x: (x @ x.mT) * 0.5, (3, 0)),
    "linear": (lambda x: F.linear(x, torch.ones(2, 0)), (3, 0)),
    "index_add": (lambda x: x.index_add(0, torch.tensor([5]), torch.ones(1, 0)), (3, 0)),
    "addmm": (lambda x: torch.addmm(torch.ones(3, 3), x, x.mT), (3, 0)),
    "chunk": (lambda x: x.chunk(2, 0)[-1] * 2, (0, 4)),
    "split": (lambda x: x.split(1, 0)[-1] * 2, (0, 4)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), (3, 0)),
}


@pytest.mark.parametrize("name", ALWAYS)
def test_an_operand_that_is_empty_whatever_comes_is_refused(name):
    if IS_2_12 and name == "split":
        pytest.skip("torch 2.12 cannot split a tensor of no rows while it traces")
    function, shape = ALWAYS[name]
    reasons = refused(subgraph(function, torch.randn(shape), fixed=True))
    assert any("without elements" in reason for reason in reasons.values())


def test_rows_of_a_norm_may_be_none():
    def norm(x):
        return F.layer_norm(x, x.shape[-1:]) * 2

    as_in_eager(compiled(norm, torch.randn(0, 4), fixed=True).run, norm, torch.randn(0, 4))


@pytest.mark.parametrize(
    ("shape", "sizes"), [((0, 1), (1, 0, 1)), ((3, 0), (0, 7)), ((2, 0, 3), (0, 4, 3)), ((4, 0), (2, 0))]
)
def test_a_size_of_zero_is_no_size_of_the_operand(shape, sizes):
    def reshaped(x):
        return (x + 1).reshape(sizes)

    as_in_eager(compiled(reshaped, torch.randn(shape), fixed=True).run, reshaped, torch.randn(shape))


@pytest.mark.usefixtures("graph_mode")
@torch.no_grad()
def test_an_operand_that_is_empty_at_a_call_leaves_that_call_to_torch():
    def mean(x):
        return (x * 2).sin().mean() + 1

    def made(fallback):
        torch._dynamo.reset()
        options = {"engine": "onnxruntime", "small_regions": "engine", "fallback": fallback}
        return torch.compile(mean, backend="dlinfer", options=options)

    def given(rows):
        x = torch.randn(rows)
        mark_unbacked(x, 0, "rows")
        return x

    run = made("allow")
    for rows in (5, 0, 6):
        x = given(rows)
        torch.testing.assert_close(run(x), mean(x), equal_nan=True)
    assert graphs() == 1
    strict = made("error")
    strict(given(5))
    with pytest.raises(GraphFallbackError, match="without elements"):
        strict(given(0))


def graphs():
    return len(report.reports())


INDEX = torch.empty(0, 7, 3, dtype=torch.int64)
NONE = {
    "remainder": (lambda x, y: x % y, (0, 2), (2,)),
    "fmod": (lambda x, y: x.fmod(y), (0, 2), (2,)),
    "div": (lambda x, y: x.div(y, rounding_mode="floor"), (0, 2), (2,)),
    "gather": (lambda x, y: x.gather(0, INDEX) + y, (5, 2, 3), ()),
    "scatter": (lambda x, y: x.scatter(0, INDEX, y), (5, 2, 3), (0, 7, 3)),
    "scatter_add": (lambda x, y: x.scatter_add(0, INDEX, y), (5, 2, 3), (0, 7, 3)),
}


@pytest.mark.parametrize("name", NONE)
@torch.no_grad()
def test_where_nothing_is_divided_read_or_written_nothing_raises(name):
    """A divisor of 0, and places that lie otherwise than the tensor."""
    function, shape, other = NONE[name]
    torch._dynamo.reset()
    options: dict[str, Any] = {"engine": "onnxruntime", "small_regions": "engine", "fallback": "allow"}
    run = torch.compile(function, backend="dlinfer", options=options)
    x, y = torch.ones(shape, dtype=torch.int32), torch.zeros(other, dtype=torch.int32)
    torch.testing.assert_close(run(x, y), function(x, y))
