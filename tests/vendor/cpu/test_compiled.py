"""Eager calls of the cpu vendor run in C++ where that can be had and is right; else by torch, counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from dlinfer import ops, settings
from dlinfer.errors import FallbackError
from dlinfer.ops.core import fallback
from dlinfer.ops.quantised import bf12
from dlinfer.vendor.cpu import compiled, native
from dlinfer.vendor.cpu.bf12.matrices import pack, unpack
from dlinfer.vendor.cpu.compiled import compiled as kernel_of
from dlinfer.vendor.cpu.selftest import kernels as kernel_selftest

NO_COMPILER = "the C++ kernels cannot be built: no compiler"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any kernel, and nothing was counted."""
    monkeypatch.setattr(compiled, "_reasons", {})
    fallback.reset()


@pytest.fixture
def without_library(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")


def counted() -> dict[tuple[str, str], int]:
    return {(one.op, one.reason): count for one, count in fallback.counts().items() if one.vendor == "cpu"}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_that_is_there_and_right_is_used(dtype: torch.dtype) -> None:
    assert native.why_not() is None
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(5, 8).to(dtype)
    assert kernel_of("linear", x, weight) is torch.ops.dlinfer_cpu.linear.default
    assert kernel_of("linears", x, weight) is torch.ops.dlinfer_cpu.linears.default
    with settings.override(fallback="error"):
        ops.linear(x, weight)
        ops.rms_norm(x, weight[0], 1e-6)
    assert counted() == {}


@pytest.mark.usefixtures("without_library")
def test_without_a_library_torch_computes_and_it_is_counted() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    with pytest.warns(
        fallback.FallbackWarning, match=r"linear runs on torch's kernels.*no compiler.*\[3, 8\]"
    ):
        got = ops.linear(x, weight, bias)
    assert torch.equal(got, functional.linear(x, weight, bias))
    with settings.override(fallback="allow"):
        for one, other in zip(
            ops.linears(x, [weight] * 2, [bias, None]), (got, functional.linear(x, weight)), strict=True
        ):
            assert torch.equal(one, other)
        half, by = x.bfloat16(), weight[0].bfloat16()
        ops.rms_norm(half, by, 1e-6)
        ops.add_rms_norm(half, half, by, 1e-6)
        ops.rms_norm(x.double(), weight[0].double(), 1e-6)  # torch's is the one kernel of float64
    names = ("linear", "linears", "rms_norm", "add_rms_norm")
    assert counted() == {(name, NO_COMPILER): 1 for name in names}


@pytest.mark.usefixtures("without_library")
def test_the_policy_error_refuses_what_is_slower() -> None:
    with settings.override(fallback="error"), pytest.raises(FallbackError, match=r"linear.*no compiler"):
        ops.linear(torch.randn(3, 8), torch.randn(5, 8))


@pytest.mark.usefixtures("forgotten")
def test_a_kernel_that_is_wrong_on_this_cpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(kind: str, precision: str) -> str | None:
        return "it is wrong" if (kind, precision) == ("native linear", "float32") else None

    monkeypatch.setattr(kernel_selftest.KERNEL_SELFTEST, "failure", fault)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with settings.override(fallback="allow"):
        assert kernel_of("linear", x, weight) is None
        assert kernel_of("linear", x.bfloat16(), weight.bfloat16()) is not None
        assert torch.equal(ops.linear(x, weight), functional.linear(x, weight))
    assert counted() == {("linear", "it is wrong"): 2}


@pytest.mark.usefixtures("forgotten")
def test_float64_is_torchs() -> None:
    x, weight = torch.randn(3, 8).double(), torch.randn(5, 8).double()
    assert torch.equal(ops.linear(x, weight), functional.linear(x, weight))
    assert torch.equal(ops.linears(x, [weight], [None])[0], functional.linear(x, weight))
    assert counted() == {}


FP8 = torch.float8_e4m3fn


def eight_bit_calls() -> dict[str, Callable[[], Any]]:
    """By the C++ kernel that the call is for."""
    x, row = torch.randn(3, 64), torch.ones(8)
    numbers, scale = torch.ones(3, 64, dtype=torch.int8), torch.ones(3, 1)
    weight, blocks, by = torch.ones(8, 64, dtype=torch.int8), torch.ones(1, 4), torch.ones(64)
    fp8 = weight.to(FP8)
    return {
        "dynamic_quant": lambda: ops.dynamic_quant(x, torch.int8),
        "rms_norm_w8a8": lambda: ops.rms_norm_w8a8(x, by, 1e-6, torch.int8),
        "add_rms_norm_w8a8": lambda: ops.add_rms_norm_w8a8(x, x, by, 1e-6, torch.int8),
        "linear_w8a8": lambda: ops.linear_w8a8(numbers, weight, scale, row, torch.float32, torch.int8, None),
        "linear_fp8": lambda: ops.linear_static_fp8(x, fp8, row, torch.ones(1), None),
        "widen_fp8": lambda: ops.linear_static_fp8(x.repeat(9, 1), fp8, row, torch.ones(1), None),
        "rounded_in_blocks": lambda: ops.linear_blocked_fp8(x, fp8, blocks, None, 16, False),
        "pack_bf12": lambda: pack(x.bfloat16()),
        "unpack_bf12": lambda: unpack(bf12.pack(x.bfloat16()), 3, 64),
    }


@pytest.mark.parametrize("name", eight_bit_calls())
def test_packed_and_8_bit_kernels_are_under_the_policy(
    name: str, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a library, and where one of them is wrong here: torch computes the same, counted or refused."""
    call = eight_bit_calls()[name]
    with settings.override(fallback="error"):
        want = call()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_selftest.KERNEL_SELFTEST, "failure", lambda kind, precision: f"{kind} is wrong")
        patch.setattr(compiled, "_reasons", {})
        with settings.override(fallback="allow"):
            torch.testing.assert_close(call(), want)
        assert counted()[name, f"native {name} is wrong"] == 1
    monkeypatch.setattr(compiled, "_reasons", {})
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    with settings.override(fallback="allow"):
        torch.testing.assert_close(call(), want)
    assert counted()[name, NO_COMPILER] == 1
    with settings.override(fallback="error"), pytest.raises(FallbackError, match="no compiler"):
        call()


@pytest.mark.usefixtures("without_library")
def test_float64_needs_no_library_of_8_bit_numbers() -> None:
    x, row = torch.randn(3, 64).double(), torch.ones(8)
    ops.dynamic_quant(x, torch.int8)
    ops.linear_static_fp8(x, torch.ones(8, 64).to(FP8), row, torch.ones(1), None)
    assert counted() == {}
