"""Results that leave a graph may be resized and freed as eager's may; those between its steps come from the pool."""

import pytest
import torch
import torch.nn.functional as F

from dlinfer import ops
from dlinfer.vendor.cpu import native
from tests.graph.compiling import compiled, last_report

pytestmark = [
    pytest.mark.usefixtures("graph_mode"),
    pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels"),
]
x, weight = torch.randn(600, 128), torch.randn(128, 128)


def loops(x, weight):
    return x.sin() * 2 + 1


def kernel(x, weight):
    return F.linear(x, weight)


def chain(x, weight):
    y = ops.rms_norm(F.linear(x, weight), weight[0], 1e-6)
    return F.linear(ops.rms_norm(y, weight[1], 1e-6), weight)


def several(x, weight):
    y = F.linear(x, weight)
    return (y * 2).sin() + 1, F.linear(y, weight), y.view(-1)


def of_a_kernel():
    """A result as kernels make it."""
    return torch.ops.dlinfer_cpu.empty_strided([600, 128], [128, 1], torch.float32, 4)


FUNCTIONS = [loops, kernel, chain, several]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_results_may_be_resized(function, dynamic):
    run = compiled(function, dynamic=dynamic)
    with torch.no_grad():
        for _ in range(2):
            results, wanted = run(x, weight), function(x, weight)
            torch.testing.assert_close(results, wanted, rtol=1e-4, atol=1e-4)
            for result in results if isinstance(results, tuple) else (results,):
                assert result.untyped_storage().resizable()
                result.untyped_storage().resize_(0)
                assert result.untyped_storage().nbytes() == 0


def test_what_stays_inside_comes_from_the_pool_again_afterwards():
    run = compiled(chain, dynamic=True)
    with torch.no_grad():
        run(x, weight)
    assert not of_a_kernel().untyped_storage().resizable()


def test_a_chain_that_fails_leaves_its_thread_the_pool():
    at, table = torch.arange(600) % 100, torch.randn(100, 128)
    run = compiled(F.embedding)
    with torch.no_grad():
        assert run(at, table).untyped_storage().resizable()
        assert any("chain" in region.source for region in last_report().regions)
        with pytest.raises(IndexError):  # while results escape
            run(at + 1, table)
    assert not of_a_kernel().untyped_storage().resizable()
