"""dlinfer's ops on tensors of the fake device: its own kernels where it has them, else the reference, by the policy."""

from dataclasses import replace

import pytest
import torch
from fake_accel import kernels
from fake_accel.torch_device import NAME
from fake_accel.vendor import LAYOUT, VENDOR
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer import ops, settings, vendor
from dlinfer.errors import FallbackError, OpArgumentError
from dlinfer.ops.core import fallback
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.vendor import discovery
from dlinfer.vendor.openvino.passes.slot_check import check_slots
from tests.ops import cases
from tests.ops.in_turn import InTurn


@pytest.fixture(autouse=True)
def _fresh():
    fallback.reset()
    kernels.calls.clear()


def samples():
    for op in ops.registry().values():
        for sample in op.sample_inputs(SampleMaker(torch.float32, layout=LAYOUT)):
            yield pytest.param(op, sample.name, id=f"{op.name}-{sample.name}")


SAMPLES = InTurn(NAME, LAYOUT)


@pytest.mark.parametrize(("op", "name"), list(samples()))
def test_every_op_is_right_on_the_device(op, name):
    args = SAMPLES.arguments(op, name, torch.float32)
    want = cases.expected(op, as_the_ops_say(op, args))
    with settings.override(fallback="allow"):
        returned = op.overload(*args)
    found = cases.results(op, args, returned)
    assert {tensor.device.type for tensor in found} <= {NAME}
    shown = cases.results(op, as_the_ops_say(op, args), pytree.tree_map_only(Tensor, Tensor.cpu, returned))
    cases.assert_close(shown, want, op.tolerances[torch.float32])
    native = op.name in kernels.KERNELS
    assert kernels.calls[op.name] == native
    taken = {(kind.op, kind.vendor): count for kind, count in fallback.counts().items()}
    assert taken == ({} if native else {(op.name, "fakecorp"): 1})


OF_CACHES = ("k_cache", "v_cache", "k_scales_zeros", "v_scales_zeros")
"""Laid out by the vendor; a scale of all tokens, which fp8 caches have, is one element."""
OWN_CACHES = {
    "lightning_indexer": ("key",),
    "sparse_flash_attention": ("key", "value", "key_rope"),
    "compressed_indexer": ("key",),
    "compressed_attention": ("compressed",),
}
"""Op -> its parameters that are caches under other names."""


def as_the_ops_say(op, args) -> tuple:
    """Copies of arguments on the host, caches in the layout of the op interface."""
    host = pytree.tree_map_only(Tensor, Tensor.cpu, args)
    paged = OF_CACHES + OWN_CACHES.get(op.name, ())
    return tuple(
        LAYOUT.canonical(arg) if parameter in paged and arg is not None and arg.dim() == 4 else arg
        for parameter, arg in zip(op.parameters, host, strict=False)
    )


def test_an_op_without_a_kernel_is_refused_by_name():
    x, weight = torch.randn(1, 3, 8, device=NAME), torch.ones(8, device=NAME)
    with settings.override(fallback="error"):
        assert ops.rms_norm(x, weight, 1e-6).device.type == NAME
        with pytest.raises(FallbackError, match=r"add_rms_norm.*fakecorp.*no kernel"):
            ops.add_rms_norm(x, x, weight, 1e-6)
        with pytest.raises(FallbackError, match="float64 is not served"):
            ops.linear(x.double(), torch.ones(2, 8, dtype=torch.float64, device=NAME))


def test_a_vendor_of_engines_alone_does_not_get_the_host_s_kernels(monkeypatch):
    """They follow pointers, which mean nothing to them in another device's memory."""
    engines_only = replace(VENDOR, name="enginecorp", load_kernels=None)
    monkeypatch.setitem(discovery._loaded, "enginecorp", engines_only)
    try:
        discovery.use("enginecorp")
        x, weight = torch.randn(3, 8, device=NAME), torch.ones(8, device=NAME)
        with settings.override(fallback="error"), pytest.raises(FallbackError, match=r"rms_norm.*enginecorp"):
            ops.rms_norm(x, weight, 1e-6)
    finally:
        discovery.use("fakecorp")


def test_two_devices_have_an_active_vendor_each():
    x = torch.randn(2, 8)
    weight = torch.ones(8)
    host = ops.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(ops.rms_norm(x.to(NAME), weight.to(NAME), 1e-6).cpu(), host)
    active = {device: vendor.active(device) for device in ("cpu", NAME)}
    assert {device: one and one.name for device, one in active.items()} == {"cpu": "cpu", NAME: "fakecorp"}
    assert discovery.kv_orders[NAME] == "BHSD" and discovery.kv_orders["cpu"] == "BSHD"
    assert kernels.calls["rms_norm"] == 1


def test_slots_are_checked_wherever_they_and_the_lengths_lie():
    table, ends = torch.tensor([[1, 0], [2, 3]]), torch.tensor([3, 5])
    slots, lengths = torch.tensor([4, 5, 6, 9, 10]), torch.tensor([3, 3])
    caches = [torch.zeros(4, 1, 4, 2, device=NAME)]
    check_slots(slots.to(NAME), table.to(NAME), 4, ends, lengths, caches)
    check_slots(slots.to(NAME), table.to(NAME), 4, ends.to(NAME), lengths.to(NAME), caches)
    with pytest.raises(OpArgumentError, match="slot 6 for token 2"):
        check_slots((slots + (slots == 6)).to(NAME), table.to(NAME), 4, ends, lengths, caches)
