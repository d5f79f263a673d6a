"""A few ops of torch's database through capture and passes; ``make graph-ops`` runs all of them."""

import itertools

import pytest

from tests.graph.matrix import samples
from tests.graph.matrix.backends import LANES, Lane
from tests.graph.matrix.op_db_job import Tally, run_op
from tests.torch_releases import since_2_13

pytestmark = pytest.mark.slow

# What Dynamo does not capture, and says so.
NOT_CAPTURED = {
    "as_strided": {"dynamo: Inplace op on input tensor"},
    "nonzero": {"dynamo: Dynamic shape operator"},
}

# One or two of each kind: pointwise, reduction, view, indexing, write, factory, random, matmul, convolution, norm,
# attention, sort, scan, several results, a result whose size depends on values.
OPS = (
    "add",
    "where",
    "sum",
    "var_mean",
    "softmax",
    "as_strided",
    "permute",
    "split",
    "cat",
    "gather",
    "index_put",
    "index_copy",
    "scatter_reduce.amax",
    "arange",
    "bernoulli",
    "addmm",
    "einsum",
    "nn.functional.linear",
    "nn.functional.conv2d",
    "nn.functional.layer_norm",
    "nn.functional.batch_norm",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.embedding",
    "topk",
    "cumsum",
    "nonzero",
)


def told(name: str, dtype: str, lane: Lane) -> Tally:
    """What became of the op's samples: nothing wrong, and a word on each that the lane asks for."""
    tally = run_op(name, dtype, lane)
    assert not tally.wrong, tally.details
    asked = sum(1 for _ in itertools.islice(samples.samples(name, dtype), lane.most))
    assert tally.equal + tally.close + tally.unsupported.total() >= asked > 0
    return tally


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.full
def test_capture_equals_eager(name: str, dtype: str) -> None:
    tally = told(name, dtype, LANES["capture"])
    assert set(tally.unsupported) == NOT_CAPTURED.get(name, set())


@since_2_13("captures no function that only returns a view of its input")
@pytest.mark.parametrize("name", ("add", "cat", "index_put", "nn.functional.linear", "nonzero", "topk"))
def test_symbolic_capture_equals_eager(name: str) -> None:
    assert not told(name, "float32", LANES["symbolic"]).unsupported


@pytest.mark.parametrize("name", ("add", "softmax", "index_put", "nn.functional.linear"))
def test_engine_equals_eager(name: str) -> None:
    assert not told(name, "float32", LANES["engine"]).unsupported
