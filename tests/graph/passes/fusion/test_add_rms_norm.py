"""A residual sum and the norm of it become one op where both are read later."""

import pytest
import torch
from expecttest import assert_expected_inline

from dlinfer.graph.passes.fusion.add_rms_norm import ADD_RMS_NORM
from dlinfer.graph.passes.fusion.rms_norm import RMS_NORM
from tests.graph.passes.fusion.capturing import captured, fused_text

HIDDEN = 64


def norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def after(total, weight):
    """The two halves of a decoder layer meet like this."""
    return total + norm(total, weight).sin()


def block(x, residual, weight):
    return after(residual + x, weight)


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    given = (
        torch.randn(2, 5, HIDDEN, dtype=dtype),
        torch.randn(2, 5, HIDDEN, dtype=dtype),
        torch.randn(HIDDEN),
    )
    x, residual, weight = given[0], given[1], given[2].to(dtype)
    for tensor in (x, residual):
        torch._dynamo.mark_static(tensor, 2)
    return x, residual, weight


def test_golden():
    assert_expected_inline(
        fused_text(captured(block, *inputs(torch.bfloat16)), RMS_NORM, ADD_RMS_NORM),
        """\
l_residual_: bf16[s0, s1, 64]
l_x_: bf16[s0, s1, 64]
l_weight_: bf16[64]
add = aten.add.Tensor(l_residual_, l_x_) -> bf16[s0, s1, 64]
to = aten.to.dtype(add, float32) -> f32[s0, s1, 64]
pow_1 = aten.pow.Tensor_Scalar(to, 2) -> f32[s0, s1, 64]
mean = aten.mean.dim(pow_1, [-1], True) -> f32[s0, s1, 1]
add_1 = aten.add.Tensor(mean, 1e-06) -> f32[s0, s1, 1]
rsqrt = aten.rsqrt(add_1) -> f32[s0, s1, 1]
mul = aten.mul.Tensor(to, rsqrt) -> f32[s0, s1, 64]
to_1 = aten.to.dtype(mul, bfloat16) -> bf16[s0, s1, 64]
mul_1 = aten.mul.Tensor(l_weight_, to_1) -> bf16[s0, s1, 64]
sin = aten.sin(mul_1) -> bf16[s0, s1, 64]
add_2 = aten.add.Tensor(add, sin) -> bf16[s0, s1, 64]
return [add_2]
--->
l_residual_: bf16[s0, s1, 64]
l_x_: bf16[s0, s1, 64]
l_weight_: bf16[64]
add_rms_norm_default = dlinfer.add_rms_norm(l_residual_, l_x_, l_weight_, 1e-06) -> (bf16[s0, s1, 64],
    bf16[s0, s1, 64])
getitem = operator.getitem(add_rms_norm_default, 0) -> bf16[s0, s1, 64]
getitem_1 = operator.getitem(add_rms_norm_default, 1) -> bf16[s0, s1, 64]
sin = aten.sin(getitem) -> bf16[s0, s1, 64]
add_2 = aten.add.Tensor(getitem_1, sin) -> bf16[s0, s1, 64]
return [add_2]
""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_numbers(dtype):
    """The sum is rounded before it is normalised, as two ops would: only the order of one float32 sum may differ.

    That is some last bits in float32, and in bfloat16 at most one step where it turns a rounding.
    """
    one = captured(block, *inputs(dtype))
    want, strides = one.run(), one.strides()
    assert one.fuse(RMS_NORM) == 1
    assert one.fuse(ADD_RMS_NORM) == 1
    assert one.count("dlinfer.add_rms_norm") == 1
    assert one.count("dlinfer.rms_norm") == 0
    bound = 2e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(one.run(), want, rtol=bound, atol=bound)
    assert one.strides() == strides


def sum_read_before_the_norm(x, residual, weight):
    total = residual + x
    early = total.cos()  # needs the sum, and what the norm needs is there by then
    return early, norm(total, weight) + total


def test_a_sum_that_is_read_before_the_norm():
    one = captured(sum_read_before_the_norm, *inputs())
    want = one.run()
    assert one.fuse(RMS_NORM, ADD_RMS_NORM) == 2
    torch.testing.assert_close(one.run(), want, rtol=2e-6, atol=2e-6)


def weight_from_the_sum(x, residual, weight):
    total = residual + x
    return norm(total, weight + total.mean()) + total


def written_in_between(x, residual, weight):
    total = residual + x
    x.mul_(2)
    return norm(total, weight) + total


REFUSED = {
    "the sum is read by nobody else": lambda x, r, w: norm(r + x, w),
    "a broadcasting sum": lambda x, r, w: block(x, r[:1, :1], w),
    "a sum with alpha": lambda x, r, w: after(torch.add(r, x, alpha=2), w),
    "a sum with a number": lambda x, r, w: after(x + 1.0, w),
    "two dtypes": lambda x, r, w: block(x, r.bfloat16(), w),
    "the weight depends on the sum": weight_from_the_sum,
    "memory written in between": written_in_between,
    "a product": lambda x, r, w: after(r * x, w),
}


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_match(name):
    one = captured(REFUSED[name], *inputs())
    assert one.fuse(RMS_NORM) == 1
    assert one.fuse(ADD_RMS_NORM) == 0
