"""Writes of compiled programs count in ``tensor._version``, though kernels are called below torch's dispatcher."""

import pytest
import torch
from torch import nn

from dlinfer import ops
from dlinfer.graph.engine_kit.held_weights import HeldWeights
from dlinfer.graph.ir.callee import COUNT_WRITES
from dlinfer.vendor.cpu import native
from tests.graph.compiling import compiled, last_report

pytestmark = [
    pytest.mark.usefixtures("graph_mode"),
    pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels"),
]


class Memory(nn.Module):
    rows: torch.Tensor
    length: torch.Tensor
    read: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(8, 4))
        self.register_buffer("length", torch.zeros((), dtype=torch.int64))
        self.register_buffer("read", torch.randn(4, 4))

    def forward(self, at, x):
        self.rows.index_copy_(0, at, x)
        self.length.add_(at.shape[0])
        return x @ self.read


class Paged(nn.Module):
    """Both caches of a layer are cut from one buffer, as engines allocate them."""

    rows: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 2, 4, 1, 8))

    def forward(self, slots, x):
        k_cache, v_cache = self.rows.unbind(0)
        ops.fill_kv_cache(x, x * 2, k_cache, v_cache, slots)
        return x + 1


def test_native_writes_count_for_buffers_and_what_is_read_does_not():
    ours, theirs = Memory(), Memory()
    run = compiled(ours)
    at, x = torch.tensor([1, 5]), torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(2):
            before = {name: value._version for name, value in ours.named_buffers()}
            run(at, x)
            theirs(at, x)
            after = {name: value._version - before[name] for name, value in ours.named_buffers()}
            assert after == {"rows": 1, "length": 1, "read": 0}
    assert torch.equal(ours.rows, theirs.rows)
    source = "\n".join(region.source for region in last_report().regions)
    assert source.count("= size0([") == 1  # one call for all tensors
    placed = {node.how for node in last_report().nodes}
    assert {"kernel native index_copy_", "kernel native add_whole_"} <= placed


def test_a_write_through_a_view_counts_for_the_base():
    module = Paged()
    run = compiled(module)
    with torch.no_grad():
        before = module.rows._version
        run(torch.tensor([0, 5]), torch.randn(2, 1, 8))
        assert module.rows._version > before
        assert module.rows.any()


def test_a_graph_that_torch_writes_for_or_that_writes_nothing_counts_nothing_itself():
    def function(x, y):
        y.clamp_(min=0)
        return torch.softmax(x + y, -1)

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        compiled(function)(x, y)
    assert (x._version, y._version) == (0, 1)


def test_tensors_without_a_count_are_written():
    module = Memory()
    run = compiled(module)
    with torch.inference_mode():
        module.rows = torch.zeros(8, 4)
        x = torch.randn(2, 4)
        run(torch.tensor([1, 5]), x)
        assert torch.equal(module.rows[[1, 5]], x)


def copies(held):
    copy = held[0].clone()
    return lambda *inputs: copy


def test_who_holds_a_copy_sees_the_write():
    module = Memory()
    reader = HeldWeights((0,), ["rows"], copies, [])
    run = compiled(module)
    with torch.no_grad():
        for step in range(3):
            run(torch.tensor([step, 5]), torch.randn(2, 4))
            assert torch.equal(reader(module.rows), module.rows)


def test_the_step_names_a_public_function():
    from torch.autograd.graph import increment_version

    from dlinfer.graph.ir import callee

    assert callee.resolve(COUNT_WRITES) is increment_version
