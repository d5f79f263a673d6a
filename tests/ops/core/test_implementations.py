"""An op with several kernels: the first that takes a call runs it, and reports name it."""

import re

import pytest
import torch

from dlinfer import ops, settings
from dlinfer.conformance.case import Case, Failed, Subject
from dlinfer.conformance.checks import values
from dlinfer.conformance.plan import plan
from dlinfer.errors import FallbackError, KernelDeclined, KernelRuleError, KernelSignatureError
from dlinfer.ops.core import fallback, kernels
from dlinfer.vendor import Probe, Vendor
from dlinfer.vendor.base import implementations, in_order, refuses
from dlinfer.vendor.reasons import where

FLOAT32 = "float32 only"


@refuses(lambda x, weight, eps: None if x.dtype is torch.float32 else FLOAT32)
def fast(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.shape[-1] == 7:
        raise KernelDeclined("rows of 7")
    return ops.rms_norm.reference(x, weight, eps)


@refuses(lambda x, weight, eps: "bfloat16" if x.dtype is torch.bfloat16 else None)
def slow(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.full_like(x, 2.0)


def vendor_of(*several: object) -> Vendor:
    table = {"rms_norm": in_order(*several)}  # pyright: ignore[reportArgumentType]
    return Vendor("two", "cpu", "made for a test", lambda: Probe(True, ""), lambda: table)


@pytest.fixture
def two(activate) -> Vendor:
    vendor = vendor_of(fast, slow)
    activate(vendor)
    return vendor


def call(size: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ops.rms_norm(torch.ones(2, size, dtype=dtype), torch.ones(size, dtype=dtype), 1e-6)


def ones(size: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, float]:
    return torch.ones(2, size, dtype=dtype), torch.ones(size, dtype=dtype), 1e-6


def test_the_first_that_takes_a_call_runs_it(two):
    assert call().mean() == pytest.approx(1.0)
    assert call(dtype=torch.float16).mean() == 2.0
    assert call(size=7).mean() == 2.0  # declined by values
    assert kernels.direct_kernel("rms_norm", "cpu")(*ones(dtype=torch.float16)).mean() == 2.0
    assert fallback.counts() == {}


def test_a_call_that_all_decline_falls_back_with_each_reason(two):
    reason = kernels.refusal("rms_norm", "cpu", ones(dtype=torch.bfloat16)) or ""
    assert f"fast: {FLOAT32}; " in reason
    assert "slow: bfloat16" in reason
    with settings.override(fallback="error"), pytest.raises(FallbackError, match="slow: bfloat16"):
        call(dtype=torch.bfloat16)


def test_reports_name_them(two):
    assert kernels.several_implementations(two) == {"rms_norm": [f"{__name__}.fast", f"{__name__}.slow"]}
    assert implementations(fast) == (fast,)


def test_the_parameters_of_each_are_checked(activate):
    def other(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(KernelSignatureError):
        activate(vendor_of(fast, other))


@pytest.mark.parametrize(
    ("rule", "takes"),
    [
        (lambda x, weight: None, r"\('x', 'weight'\)"),
        (lambda x, scale, eps: None, r"\('x', 'scale', 'eps'\)"),
        (lambda x, eps, weight: None, r"\('x', 'eps', 'weight'\)"),
        (lambda x, weight, eps, more: None, r"\('x', 'weight', 'eps', 'more'\)"),
        (lambda *args: None, r"\('args',\)"),
    ],
    ids=["one less", "another name", "another order", "one more", "by position alone"],
)
def test_the_parameters_of_each_rule_are_checked(activate, rule, takes):
    @refuses(rule)
    def other(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x

    with pytest.raises(KernelSignatureError, match=f"rule of the kernel for 'rms_norm' takes {takes}.*'eps'"):
        activate(vendor_of(fast, other))


def always(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.full_like(x, 3.0)


@pytest.mark.parametrize("answer", [False, True, "", ["float32 only"]])
@pytest.mark.parametrize("attached", [refuses, where])
def test_a_rule_that_returns_neither_a_text_nor_none_is_an_error(activate, attached, answer):
    def rule(*args, **kwargs):
        return answer

    names = rf"rule {__name__}\..*\.rule of the kernel {__name__}\.always returned {re.escape(repr(answer))}"
    kernel = attached(rule)(always)
    for one in (kernel, in_order(kernel, fast)):
        activate(Vendor("ruled", "cpu", "", lambda: Probe(True, ""), lambda one=one: {"rms_norm": one}))
        with pytest.raises(KernelRuleError, match=names):
            call()
        with pytest.raises(KernelRuleError, match=names):
            kernels.refusal("rms_norm", "cpu", ones())
        with pytest.raises(KernelRuleError, match=names):
            kernels.direct_kernel("rms_norm", "cpu")(*ones())


@pytest.mark.parametrize("rule", [lambda x, weight, eps, dtype=None: None, lambda *args, **kwargs: None])
def test_a_rule_may_take_more(activate, rule):
    @refuses(rule)
    def other(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.full_like(x, 3.0)

    activate(vendor_of(other))
    assert call().mean() == 3.0


def test_conformance_checks_each_on_its_own(two):
    case = Case(Subject(two, "cpu"), ops.registry()["rms_norm"], torch.float32, "one token")
    with pytest.raises(Failed, match="slow: "):  # the dispatcher never reaches it in float32
        values.implementations(case)
    right = Case(Subject(vendor_of(fast, fast), "cpu"), case.op, torch.float32, "one token")
    assert values.implementations(right) == "; ".join([f"{__name__}.fast ran"] * 2)
    tasks = plan(case.subject, ops=["rms_norm"], checks=["implementations"], thorough=False)
    assert [task.check.name for task in tasks if task.check is not None]
