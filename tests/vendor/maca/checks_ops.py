"""Each op on the simulated card against its reference in float64: the samples of the interface, in all dtypes.

What the published sources do not admit is refused with a reason and counted. Sizes that real models have are in
checks_sizes.py.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer import settings
from dlinfer.ops.core import fallback
from dlinfer.vendor import maca
from dlinfer.vendor.maca.kernels import KERNELS
from tests.ops import cases
from tests.ops.in_turn import InTurn, names
from tests.vendor.maca import tolerances
from tests.vendor.maca.simulated_card import triton_package
from tests.vendor.maca.simulated_card.install import NAME

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUT = maca.VENDOR.kv_cache_layout
SAMPLES = InTurn(NAME, LAYOUT)
answered: Counter[tuple[str, str, bool]] = Counter()
"""(op, dtype, whether the kernel answered) -> samples."""


def compare(op, args: tuple, dtype: torch.dtype) -> dict:
    """Run an op on the device and its reference in float64 on the host; gives the fallbacks taken."""
    want = cases.expected(op, pytree.tree_map_only(Tensor, Tensor.cpu, args))
    fallback.reset()
    with settings.override(fallback="allow"):
        returned = op.overload(*args)
    found = cases.results(op, args, returned)
    assert {tensor.device.type for tensor in found} <= {NAME}
    cases.assert_close(pytree.tree_map_only(Tensor, Tensor.cpu, found), want, tolerances.of(op, dtype))
    return fallback.counts()


@pytest.mark.parametrize(("op", "name", "dtype"), list(names(LAYOUT, DTYPES, KERNELS)))
def test_every_sample(op, name, dtype):
    args = SAMPLES.arguments(op, name, dtype)
    kept = pytree.tree_map_only(Tensor, lambda one: one.cpu().clone(), args)
    taken = compare(op, args, dtype)
    answered[op.name, cases.short(dtype), not taken] += 1
    for parameter, before, after in zip(op.parameters, kept, args, strict=True):
        if isinstance(before, Tensor) and parameter not in op.mutates and not aliased(args, parameter, op):
            assert torch.equal(bits(before), bits(after.cpu())), f"{parameter} was written"
    if op.name not in KERNELS:
        assert [kind.reason for kind in taken] == ["the vendor has no kernel for this op"]


def aliased(args: tuple, parameter: str, op) -> bool:
    """Whether an argument shares memory with one that the op writes."""
    one = args[op.parameters.index(parameter)]
    written = [args[op.parameters.index(name)] for name in op.mutates]
    return any(one.untyped_storage()._cdata == other.untyped_storage()._cdata for other in written)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


LEAST = {
    "rms_norm": 1.0,
    "add_rms_norm": 1.0,
    "silu_and_mul": 1.0,
    "linear": 1.0,
    "moe_gating_topk_softmax": 1.0,
    "fused_moe": 1.0,
    "rms_norm_w8a8": 0.5,  # the others are float8
    "add_rms_norm_w8a8": 0.5,
    "dynamic_quant": 0.5,
    "fill_kv_cache": 0.8,  # values of another size than keys, in caches apart
    "prefill_attention": 0.9,  # alibi with sinks
}
"""The least share of an op's samples in float16 that its kernel answers. Those of other ops have small pages, tables of
unlike halves, or columns and groups that no model has: checks_sizes.py."""


@pytest.mark.parametrize("op", LEAST)
def test_kernels_answer(op):
    """Runs last in this file: what the samples above found, so that a rule which refuses all is no pass."""
    if op == "fused_moe" and (reason := triton_package.missing()):
        pytest.skip(reason)
    native, left = answered[op, "float16", True], answered[op, "float16", False]
    assert native + left > 0 and native >= LEAST[op] * (native + left), (op, native, left)
