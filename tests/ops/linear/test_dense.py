"""linear's Python call: the weight layout of a setting, and the sum over a process group."""

import os
import subprocess
import sys

import pytest
import torch

from dlinfer import ops, settings
from dlinfer.errors import OpArgumentError

RANK = """
import sys, torch, torch.distributed as dist
from dlinfer import ops
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
x = torch.full((1, 2), float(rank + 1))
for group in ("", None, dist.new_group([0, 1])):
    out = ops.linear(x, torch.ones(3, 2), None, all_reduce=True, group=group)
    assert torch.equal(out, torch.full((1, 3), 6.0)), out
dist.destroy_process_group()
"""


def test_nn_layout_takes_the_weight_as_in_by_out():
    x, weight, bias = torch.randn(1, 5, 16), torch.randn(8, 16), torch.randn(8)
    want = ops.linear(x, weight, bias)
    with settings.override(linear_use_nn_layout=True):
        torch.testing.assert_close(ops.linear(x, weight.t().contiguous(), bias), want)
        with pytest.raises(OpArgumentError, match="argument weight"):
            ops.linear(x, weight, bias)


def test_a_compiled_call_follows_the_setting():
    torch._dynamo.reset()
    x, weight = torch.randn(1, 5, 16), torch.randn(16, 16)
    function = torch.compile(ops.linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(function(x, weight), x @ weight.t())
    with settings.override(linear_use_nn_layout=True):
        torch.testing.assert_close(function(x, weight), x @ weight)
    torch.testing.assert_close(function(x, weight), x @ weight.t())


@pytest.mark.slow  # two processes
def test_all_reduce_sums_over_the_group(tmp_path):
    store = tmp_path / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(store)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=500) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
