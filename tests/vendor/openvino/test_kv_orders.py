"""Caches that lie as OpenVINO wants them, in graphs of the engine inductor."""

from collections.abc import Iterator

import pytest
import torch

import dlinfer
from dlinfer import ops
from dlinfer.vendor import discovery


@pytest.fixture
def openvino_layout() -> Iterator[None]:
    before = discovery.activate_default("cpu")
    assert before is not None
    dlinfer.vendor.use("openvino")
    yield
    dlinfer.vendor.use(before.name)


def test_cpu_kernels_follow_the_layout_of_the_active_vendor(openvino_layout):
    """Heads and slots are as many, so that only the order tells them apart."""

    def step(k, v, k_cache, v_cache, slots, q, table):
        caches = ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
        ends, lengths = torch.tensor([1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        return ops.paged_decode_attention(q, caches[0], caches[1], table, 32, ends, lengths, 2, 32, 32)

    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, 32, 16, generator=generator) for _ in range(3))
    table = torch.tensor([[1]], dtype=torch.int32)
    caches = [torch.randn(2, 32, 32, 16, generator=generator) for _ in range(2)]
    eager, compiled = ([one.clone() for one in caches] for _ in range(2))
    compile_step = torch.compile(step, backend="dlinfer", options={"engine": "inductor"})
    with torch.no_grad():
        expected = step(k, v, eager[0], eager[1], torch.tensor([33]), q, table)
        result = compile_step(k, v, compiled[0], compiled[1], torch.tensor([33]), q, table)
    assert torch.equal(compiled[0], eager[0]) and torch.equal(compiled[1], eager[1])
    torch.testing.assert_close(result, expected)
    assert torch.equal(eager[0][1, :, 1], k[0])  # [blocks, heads, slots, size]
