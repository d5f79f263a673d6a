"""Each op on the simulated MLU against its reference in float64: the samples of the interface, in all dtypes.

What the vendor's documents do not admit is refused with a reason, which ``REFUSED`` repeats. Sizes that real models
have are in checks_sizes.py.
"""

import re

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer import ops, settings
from dlinfer.conformance.case import bits
from dlinfer.ops.core import fallback
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.vendor.camb import VENDOR
from dlinfer.vendor.camb.kernels import KERNELS
from tests.ops import cases
from tests.ops.in_turn import InTurn, names
from tests.vendor.camb import comparing
from tests.vendor.camb.simulated_mlu import install

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUT = VENDOR.kv_cache_layout
SAMPLES = InTurn(install.NAME, LAYOUT)
NO_KERNEL = "the vendor has no kernel for this op"

EXTRAS = "logit_softcapping|alibi_slope|sink"
REFUSED = {
    "rms_norm_w8a8": "torch.int8 is supported",
    "add_rms_norm_w8a8": "torch.int8 is supported",
    "dynamic_quant": "torch.int8 is supported",
    "linear_w8a8": "torch.int8 is supported|float16, bfloat16 are supported, not float32",
    "fused_moe_w8a8": "torch.int8 is supported|float16, bfloat16 are supported, not float32",
    "prefill_attention": f"{EXTRAS}|9 queries but only 4 keys",
    "paged_prefill_attention": f"{EXTRAS}|blocks of 16 slots are supported, not of 8",
    "paged_decode_attention": EXTRAS,
}
"""Op -> what the reasons of its refusals say; ops that are not here refuse no sample."""


def compare(op, args: tuple, dtype: torch.dtype) -> dict:
    """Run an op on the device and its reference in float64 on the host; gives the fallbacks taken."""
    want = cases.expected(op, comparing.host(op, args))
    fallback.reset()
    with settings.override(fallback="allow"):
        returned = op.overload(*args)
    got = comparing.found(op, args, returned)
    assert {tensor.device.type for tensor in got} <= {install.NAME}
    cases.assert_close([one.cpu() for one in got], want, op.tolerances[dtype])
    return fallback.counts()


@pytest.mark.parametrize(("op", "name", "dtype"), list(names(LAYOUT, DTYPES, KERNELS)))
def test_every_sample(op, name, dtype):
    args = SAMPLES.arguments(op, name, dtype)
    kept = pytree.tree_map_only(Tensor, lambda one: one.cpu().clone(), args)
    taken = compare(op, args, dtype)
    reasons = [kind.reason for kind in taken]
    if op.name not in KERNELS:
        assert reasons == [NO_KERNEL]
    for reason in reasons:
        assert reason == NO_KERNEL or re.search(REFUSED[op.name], reason), reason
    for parameter, before, after in zip(op.parameters, kept, args, strict=True):
        if isinstance(before, Tensor) and parameter not in op.mutates and not aliased(args, parameter, op):
            assert torch.equal(bits(before), bits(after)), f"{parameter} was written"


def aliased(args: tuple, parameter: str, op) -> bool:
    """Whether an argument shares memory with one that the op writes."""
    one = args[op.parameters.index(parameter)]
    written = [args[op.parameters.index(name)] for name in op.mutates]
    return any(one.untyped_storage()._cdata == other.untyped_storage()._cdata for other in written)


def test_the_kernels_answer_samples_in_every_dtype_that_they_take():
    """A reason that is too broad would leave an op to its reference."""
    for name in KERNELS:
        op = ops.registry()[name]
        for dtype in DTYPES:
            native = 0
            for sample in op.sample_inputs(SampleMaker(dtype, device=install.NAME, layout=LAYOUT)):
                fallback.reset()
                with settings.override(fallback="allow"):
                    op.overload(*sample.args)
                native += not fallback.counts()
            halves_only = name in ("linear_w8a8", "fused_moe_w8a8") and dtype is torch.float32
            assert bool(native) is not halves_only, f"{name}, {dtype}"
