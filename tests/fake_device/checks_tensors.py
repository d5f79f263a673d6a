"""Whether the fake device is a device: its tensors, memory and refusals. ``test_in_a_process.py`` runs this."""

import gc

import pytest
import torch
from fake_accel.torch_device import NAME

from dlinfer.conformance.stand_in import memory


def made(value: torch.Tensor) -> torch.Tensor:
    moved = value.to(NAME)
    assert moved.device.type == NAME
    return moved


def test_copies_keep_sizes_dtypes_and_values():
    for value in (
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.arange(5),
        torch.tensor([True, False]),
        torch.tensor(2.5),
        torch.empty(0, 3),
    ):
        back = made(value).cpu()
        assert torch.equal(back, value) and back.dtype is value.dtype and back.stride() == value.stride()


def test_factories_and_aten_ops_compute_on_the_device():
    x = torch.randn(4, 6)
    y = made(x)
    for function in (
        lambda v: v + v.new_ones(6),
        lambda v: v.t()[1:].contiguous().softmax(-1),
        lambda v: v @ v.t(),
        lambda v: torch.cat([v, torch.zeros_like(v), torch.full((1, 6), 2.0, device=v.device)]),
        lambda v: v[torch.arange(4, device=v.device) % 2 == 0],
        lambda v: (v * 2 + 1) / 3 - v.to(torch.bfloat16).mul(0.5).float(),
        lambda v: torch.topk(v, 2).indices,
        lambda v: torch.nn.functional.scaled_dot_product_attention(*v.view(1, 2, 2, 6).expand(3, 1, 2, 2, 6)),
        lambda v: v.unfold(1, 2, 2).cumsum(-1),
        lambda v: torch.where(v > 0, v, 0),
    ):
        found, wanted = function(y), function(x)
        assert found.device.type == NAME
        torch.testing.assert_close(found.cpu(), wanted)


def test_views_share_memory_and_writes_reach_it():
    x = torch.zeros(2, 3, device=NAME)
    x.view(3, 2)[1:].add_(1)
    x[:, torch.tensor([0])] = 7  # positions may come from the host
    x.t()[2].copy_(torch.tensor([3, 4]))
    assert x.tolist() == [[7, 0, 3], [7, 1, 4]]
    out = torch.empty(0, dtype=torch.int64, device=NAME)
    torch.arange(3, out=out)
    assert out.tolist() == [0, 1, 2]


def test_two_devices_are_refused_where_a_device_refuses_them():
    x = torch.ones(2, device=NAME)
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]
    for function in (
        lambda: x + torch.ones(2),
        lambda: torch.cat([x, torch.ones(2)]),
        lambda: torch.ones(2).add_(x),
    ):
        with pytest.raises(RuntimeError, match="two"):
            function()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_memory_is_counted_and_ends():
    gc.collect()
    before = memory.free()
    x = torch.ones(1 << 20, device=NAME)
    view = x[1:]
    assert before - memory.free() == 4 << 20
    del x
    assert before - memory.free() == 4 << 20
    del view
    assert memory.free() == before
    with pytest.raises(torch.OutOfMemoryError, match="stand-in has"):
        torch.empty(memory.TOTAL, device=NAME)


def test_a_storage_is_copied_to_the_host_and_back():
    """As Triton's interpreter does with its arguments."""
    x = made(torch.arange(6.0))
    host = x.untyped_storage().cpu()
    assert torch.equal(torch.empty(0).set_(host), torch.arange(6.0))
    host.copy_(torch.ones(6).untyped_storage())
    x.untyped_storage().copy_(host)
    assert torch.equal(x.cpu(), torch.ones(6))
