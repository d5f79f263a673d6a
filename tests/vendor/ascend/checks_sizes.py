"""Attention, experts and weights of sizes that the vendor's documents admit: every call is answered by a kernel.

The interface's own samples are small; pages of 8 tokens and heads of 24 numbers are refused by name (checks_ops.py).
"""

import json

import pytest
import torch

from dlinfer import ops
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.ascend import VENDOR
from tests.ops import cases
from tests.vendor.ascend import accept, real_sizes
from tests.vendor.ascend.checks_ops import compare
from tests.vendor.ascend.simulated_npu import install

HALVES = (torch.float16, torch.bfloat16)
halves = pytest.mark.parametrize("dtype", HALVES, ids=cases.short)


def maker(dtype: torch.dtype) -> SampleMaker:
    return SampleMaker(dtype, device=install.NAME, layout=VENDOR.kv_cache_layout)


def native(op, args: tuple, dtype: torch.dtype) -> None:
    assert compare(op, args, dtype) == {}


@halves
@pytest.mark.parametrize("call", list(real_sizes.calls()), ids=lambda call: f"{call.op}-{call.name}")
def test_attention(call, dtype):
    native(ops.registry()[call.op], call.arguments(maker(dtype)), dtype)
    assert (install.calls["_npu_paged_attention_mla"] == 1) is (call.name == "latent")


@halves
@pytest.mark.parametrize("size", [64, 128, 32, 80])
def test_rotation_leaves_its_arguments_alone(size, dtype):
    """The vendor's fused op for 64 and 128 writes into them."""
    make = maker(dtype)
    angles = make.tensor(5, size, scale=3.0)
    q, k = make.tensor(5, 4, size), make.tensor(5, 2, size)
    before = q.cpu().clone(), k.cpu().clone()
    native(ops.apply_rotary_pos_emb, (q, k, angles.cos(), angles.sin()), dtype)
    assert torch.equal(q.cpu(), before[0]) and torch.equal(k.cpu(), before[1])
    assert install.calls["npu_apply_rotary_pos_emb"] == (size in (64, 128))


@halves
@pytest.mark.parametrize(("inner", "group"), [(256, 128), (256, 0), (64, 64), (192, 64), (160, 128)])
@pytest.mark.parametrize("zeros", [True, False])
def test_weights_of_four_bits(inner, group, zeros, dtype):
    make = maker(dtype)
    words = make.integers(-(2**31), 2**31, inner, 5).int()
    groups = AWQ.of_groups(group).groups(inner)
    scales = (make.tensor(groups, 40).abs() + 0.5) * 0.01
    offset = make.integers(-(2**31), 2**31, groups, 5).int() if zeros else None
    x, bias = make.tensor(3, inner), make.tensor(40).half()
    native(ops.weight_quant_matmul, (x, words, scales.half(), offset, bias, group), dtype)


def test_a_weight_is_prepared_once_and_again_when_it_is_written():
    make = maker(torch.float16)
    words, scales = make.integers(-(2**31), 2**31, 64, 2).int(), make.tensor(2, 16).abs() * 0.01
    x = make.tensor(2, 64)
    for _ in range(3):
        native(ops.weight_quant_matmul, (x, words, scales, None, None, 32), torch.float16)
    assert install.calls["npu_convert_weight_to_int4pack"] == 1
    words.add_(1)
    native(ops.weight_quant_matmul, (x, words, scales, None, None, 32), torch.float16)
    scales.mul_(2)
    native(ops.weight_quant_matmul, (x, words, scales, None, None, 32), torch.float16)
    assert install.calls["npu_convert_weight_to_int4pack"] == 3


@halves
def test_slots_are_looked_at_once_a_step(dtype, monkeypatch):
    from dlinfer.vendor.ascend import slots as module

    looks = []
    real = module.check_slots
    monkeypatch.setattr(module, "check_slots", lambda *args: looks.append(1) or real(*args))
    make = maker(dtype)
    k, v, slots = make.tensor(4, 2, 64), make.tensor(4, 2, 64), make.permutation(256)[:4]
    for _ in range(3):  # layers
        caches = make.cache(2, 128, 2, 64), make.cache(2, 128, 2, 64)
        native(ops.fill_kv_cache, (k, v, *caches, slots), dtype)
    slots.copy_(slots.flip(0))
    native(ops.fill_kv_cache, (k, v, make.cache(2, 128, 2, 64), make.cache(2, 128, 2, 64), slots), dtype)
    assert len(looks) == 2


def test_the_command_that_accepts_a_card(tmp_path, capsys, monkeypatch):
    """On the simulation, with a few calls: what it says of good ones, of wrong numbers and of a kernel that fails."""
    few = {name: accept.KERNELS[name] for name in ("silu_and_mul", "dynamic_quant")}
    monkeypatch.setattr(accept, "KERNELS", few)
    monkeypatch.setattr(real_sizes, "calls", lambda: iter(()))
    file = tmp_path / "found.json"
    assert accept.main(str(file)) == 0
    found = json.loads(file.read_text())
    assert found["card"]["name"] == "Ascend910B2" and "Atlas A2" in found["card"]["taken_for"]
    assert {row["outcome"] for row in found["calls"]} == {"native", "refused"}
    assert all(row["detail"] for row in found["calls"] if row["outcome"] == "refused")
    assert "PASS" in capsys.readouterr().out
    real = torch.ops.npu.npu_swiglu
    monkeypatch.setitem(torch.ops.npu.__dict__, "npu_swiglu", lambda x, dim: real(x, dim) * 2)
    monkeypatch.setitem(torch.ops.npu.__dict__, "npu_dynamic_quant", lambda *args, **kwargs: 1 / 0)
    assert accept.main(str(file)) == 1
    assert {row["outcome"] for row in json.loads(file.read_text())["calls"]} >= {"wrong", "failed"}
    assert "ZeroDivisionError" in capsys.readouterr().out
