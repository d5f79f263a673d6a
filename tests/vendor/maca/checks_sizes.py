"""Ops in sizes that real models have: every call is answered by a kernel, in both dtypes that models come in.

The interface's own samples are small; pages of 8 tokens and tables of unlike halves are refused by name
(checks_ops.py).
"""

import pytest
import torch

from dlinfer import ops, settings
from dlinfer.errors import OpArgumentError
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.vendor import maca
from dlinfer.vendor.maca import caches, pointwise
from tests.ops import cases
from tests.vendor.maca import real_sizes
from tests.vendor.maca.checks_ops import compare
from tests.vendor.maca.simulated_card import triton_package
from tests.vendor.maca.simulated_card.calling import calls
from tests.vendor.maca.simulated_card.install import NAME

HALVES = (torch.float16, torch.bfloat16)
halves = pytest.mark.parametrize("dtype", HALVES, ids=cases.short)


def maker(dtype: torch.dtype) -> SampleMaker:
    return SampleMaker(dtype, device=NAME, layout=maca.VENDOR.kv_cache_layout)


def native(op, args: tuple, dtype: torch.dtype) -> None:
    assert compare(op, args, dtype) == {}


@halves
@pytest.mark.parametrize("call", list(real_sizes.calls()), ids=lambda call: f"{call.op}-{call.name}")
def test_real_sizes(call, dtype):
    if call.op == "fused_moe" and (reason := triton_package.missing()):
        pytest.skip(reason)
    native(ops.registry()[call.op], call.arguments(maker(dtype)), dtype)


@halves
def test_rotation_leaves_its_arguments_alone(dtype):
    """The vendor's function writes into them."""
    make = maker(dtype)
    _, _, *tables = real_sizes.rotation(make, 64)
    q, k = make.tensor(5, 4, 64), make.tensor(5, 2, 64)  # without gaps: nothing would have copied them
    before = q.cpu().clone(), k.cpu().clone()
    native(ops.apply_rotary_pos_emb, (q, k, *tables), dtype)
    assert torch.equal(q.cpu(), before[0]) and torch.equal(k.cpu(), before[1])
    assert calls["lmdeploy_rotary_embedding"] == 1


def test_a_weight_of_four_bits_is_prepared_once_and_again_when_it_is_written():
    x, words, scales, _, bias, group = real_sizes.four_bits(maker(torch.float16), 64, 32, False)
    for _ in range(3):
        native(ops.weight_quant_matmul, (x, words, scales, None, bias, group), torch.float16)
    assert calls["awq_to_gptq_4bit"] == 1
    words.add_(1)
    native(ops.weight_quant_matmul, (x, words, scales, None, bias, group), torch.float16)
    scales.mul_(2)
    native(ops.weight_quant_matmul, (x, words, scales, None, bias, group), torch.float16)
    assert calls["awq_to_gptq_4bit"] == 3


@pytest.mark.parametrize(
    ("group", "words", "says"),
    [(96, 6, "not 96"), (128, 6, "multiples of 128"), (64, 5, "multiples of 16")],
)
def test_weights_that_the_vendor_would_take_and_give_zeros_for(group, words, says):
    from dlinfer.ops.core import kernels

    make = maker(torch.float16)
    inner = 192
    qweight = make.integers(-9, 9, inner, words).int()
    scales = make.tensor(-(-inner // group), words * 8)
    given = make.tensor(3, inner), qweight, scales, None, None, group
    assert says in (kernels.refusal("weight_quant_matmul", NAME, given) or "")


def test_looks_are_one_a_step(monkeypatch):
    make, looks = maker(torch.float16), []
    for module, name in ((caches, "_highest"), (pointwise, "_agreement")):
        kept = getattr(module, name)
        real = kept._look
        monkeypatch.setattr(
            kept, "_look", lambda *given, real=real, name=name: looks.append(name) or real(*given)
        )
    rotation = real_sizes.rotation(make, 64)
    k, slots = make.tensor(4, 2, 64), make.permutation(64)[:4]
    pages = make.cache(2, 32, 2, 64), make.cache(2, 32, 2, 64)
    for _ in range(3):  # layers
        native(ops.fill_kv_cache, (k, k, *pages, slots), torch.float16)
        native(ops.apply_rotary_pos_emb, rotation, torch.float16)
    assert sorted(looks) == ["_agreement", "_highest"]
    slots.copy_(slots.flip(0))
    rotation[2].mul_(0.5)
    native(ops.fill_kv_cache, (k, k, *pages, slots), torch.float16)
    native(ops.apply_rotary_pos_emb, rotation, torch.float16)
    assert len(looks) == 4
    slots[0] = 64
    before = [cache.cpu().clone() for cache in pages]
    with pytest.raises(OpArgumentError, match="slots below 64"):
        ops.fill_kv_cache(k, k, *pages, slots)
    for cache, was in zip(pages, before, strict=True):
        assert torch.equal(cache.cpu().nan_to_num(nan=5.0), was.nan_to_num(nan=5.0))


def test_padding_is_not_written():
    make = maker(torch.float16)
    slots = torch.tensor([5, -1, 3], device=NAME)
    k = make.tensor(3, 2, 64)
    native(
        ops.fill_kv_cache, (k, k, make.cache(2, 16, 2, 64), make.cache(2, 16, 2, 64), slots), torch.float16
    )


def test_tables_of_unlike_halves_are_refused_by_name():
    from dlinfer.errors import FallbackError

    make = maker(torch.float16)
    angles = make.tensor(5, 64, scale=3.0)
    given = make.tensor(5, 4, 64), make.tensor(5, 2, 64), angles.cos(), angles.sin()
    with settings.override(fallback="error"), pytest.raises(FallbackError, match="halves differ"):
        ops.apply_rotary_pos_emb(*given)


def test_a_view_that_begins_between_vectors():
    """Eight numbers of 16 bits are read at once: a tensor that begins elsewhere is copied first."""
    make = maker(torch.float16)
    x = make.tensor(2 * 64 + 1).view(-1)[1:].view(2, 64)
    native(ops.dynamic_quant, (x, torch.int8), torch.float16)
    native(ops.rms_norm, (x, make.tensor(64), 1e-6), torch.float16)
