"""A few ops of torch's database through capture and passes; ``make graph-ops`` runs all of them."""

import pytest

from tests.graph.matrix.backends import LANES
from tests.graph.matrix.op_db_job import run_op

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("dtype", LANES["capture"].dtypes)
@pytest.mark.parametrize("name", OPS)
def test_capture_equals_eager(name: str, dtype: str) -> None:
    tally = run_op(name, dtype, LANES["capture"])
    assert not tally.wrong, tally.details
    assert tally.equal or name == "nonzero"  # Dynamo breaks the graph there by default


@pytest.mark.parametrize("name", ("add", "cat", "index_put", "nn.functional.linear", "nonzero", "topk"))
def test_symbolic_capture_equals_eager(name: str) -> None:
    tally = run_op(name, "float32", LANES["symbolic"])
    assert not tally.wrong, tally.details
    assert tally.equal and not tally.unsupported


@pytest.mark.parametrize("name", ("add", "softmax", "index_put", "nn.functional.linear"))
def test_engine_equals_eager(name: str) -> None:
    tally = run_op(name, "float32", LANES["engine"])
    assert not tally.wrong, tally.details
    assert tally.equal + tally.close and not tally.unsupported
