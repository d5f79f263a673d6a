"""Attention, experts and weights of sizes that the vendor's documents admit: every call is answered by a kernel.

The interface's own samples are small; pages of 8 tokens and heads of 24 numbers are refused by name (checks_ops.py).
"""

from dataclasses import replace

import pytest
import torch

from dlinfer import ops
from dlinfer.ops import attention_samples
from dlinfer.ops.attention_samples import (
    DECODE,
    PAGED_PREFILL,
    PREFILL,
    Case,
    lengths,
    new_tokens,
    pages,
    per_head,
    queries,
)
from dlinfer.ops.packing import AWQ
from dlinfer.ops.samples import SampleMaker
from dlinfer.vendor.ascend import VENDOR
from tests.ops import cases
from tests.vendor.ascend.checks_ops import compare
from tests.vendor.ascend.simulated_npu import install

HALVES = (torch.float16, torch.bfloat16)
halves = pytest.mark.parametrize("dtype", HALVES, ids=cases.short)
NOT_SERVED = ("softcap", "alibi", "sinks")


def served(table: tuple[Case, ...], block_size: int, sizes: tuple[int, int]) -> list:
    """Cases of the interface without what the vendor has not, in real sizes, over as many pages as before."""
    made = []
    for case in table:
        if any(getattr(case, one) for one in NOT_SERVED):
            continue
        longer = case.kv_lens and tuple(
            count and count * block_size // case.block_size for count in case.kv_lens
        )
        made.append(replace(case, kv_lens=longer, block_size=block_size, sizes=sizes))
    return [pytest.param(one, id=f"{one.name}-{block_size}-{sizes[0]}") for one in made]


def maker(dtype: torch.dtype) -> SampleMaker:
    return SampleMaker(dtype, device=install.NAME, layout=VENDOR.kv_cache_layout)


def native(op, args: tuple, dtype: torch.dtype) -> None:
    assert compare(op, args, dtype) == {}


@halves
@pytest.mark.parametrize("case", served(PREFILL, 8, (128, 128)) + served(PREFILL, 8, (64, 64)))
def test_prompts(case, dtype):
    make = maker(dtype)
    q, out = queries(make, case)
    k, v = new_tokens(make, case)
    extras = case.softmax_scale, case.causal, *case.window, case.softcap, *per_head(make, case)
    native(
        ops.prefill_attention, (q, k, v, *lengths(case), max(case.q_lens), *case.heads, out, *extras), dtype
    )


@halves
@pytest.mark.parametrize(
    "case", served(PAGED_PREFILL, 128, (128, 128)) + served(PAGED_PREFILL, 256, (64, 64))
)
def test_prompts_over_pages(case, dtype):
    make = maker(dtype)
    q, out = queries(make, case)
    cached = *pages(make, case), case.block_size
    extras = case.softmax_scale, case.causal, *case.window, case.softcap, *per_head(make, case)
    spans = *lengths(case), max(case.q_lens), max(case.keys)
    native(ops.paged_prefill_attention, (q, *cached, *spans, *case.heads, out, *extras), dtype)


@halves
@pytest.mark.parametrize("case", served(DECODE, 128, (128, 128)) + served(DECODE, 16, (64, 64)))
def test_decoding(case, dtype):
    make = maker(dtype)
    q, out = queries(make, case)
    cached = *pages(make, case), case.block_size
    extras = case.softmax_scale, case.window[0], case.softcap, *per_head(make, case)
    args = (q, *cached, lengths(case)[1], max(case.keys), *case.heads, out, *extras)
    native(ops.paged_decode_attention, args, dtype)


@halves
def test_latent_decoding(dtype):
    """DeepSeek's cache: values are the first part of the keys. Of the vendor's op only the schema is known."""
    make, heads = maker(dtype), 16
    case = Case("latent", (1, 1, 1), (130, 1, 256), heads=(heads, 1), sizes=(576, 576), block_size=128)
    q, out = queries(make, replace(case, sizes=(576, 512)))
    keys, _, table = pages(make, case)
    args = (
        q,
        keys,
        keys[..., :512],
        table,
        128,
        lengths(case)[1],
        256,
        heads,
        1,
        out,
        0.05,
        -1,
        0.0,
        None,
        None,
    )
    native(ops.paged_decode_attention, args, dtype)
    assert install.calls["_npu_paged_attention_mla"] == 1


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


def test_the_table_of_cases_is_the_interface_s():
    assert {one.name for one in attention_samples.DECODE} >= {"a padding row", "window", "block boundaries"}
