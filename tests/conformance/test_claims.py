"""What a vendor claims decides what is asked of it, and what breaks it."""

from dataclasses import replace

import pytest
import torch

from dlinfer.conformance import here
from dlinfer.conformance.result import DECLINED, FAILED, PASSED, UNCLAIMED
from dlinfer.errors import KernelDeclined, UnknownOpError
from dlinfer.ops import registry
from dlinfer.vendor import Claim, Probe, Vendor, discovery
from dlinfer.vendor.base import refuses
from tests.graph.compiling import StubEngine

VALUES = ["values"]


def only_float32(x, weight, eps):
    if x.dtype is not torch.float32:
        raise KernelDeclined(reason="float32 alone")
    return registry()["rms_norm"].reference(x, weight, eps)


def no_empty(x):
    return registry()["silu_and_mul"].reference(x)


KERNELS = {
    "rms_norm": only_float32,
    "silu_and_mul": refuses(lambda x: "empty" if x.numel() == 0 else None)(no_empty),
}


@pytest.fixture
def asked(monkeypatch):
    """``asked(claims)``: the states of each op and dtype of a vendor with two kernels that claims so."""

    def ask(claims, ops=("rms_norm", "silu_and_mul", "linear")):
        vendor = Vendor(
            "two", "cpu", "", lambda: Probe(True, ""), lambda: KERNELS, claims=claims and (lambda: claims)
        )
        monkeypatch.setitem(discovery._loaded, "two", vendor)
        report = here.run("two", ops=ops, checks=VALUES)
        found = {}
        for one in report.results:
            found.setdefault((one.op, one.dtype), set()).add(one.state)
        return report, found

    return ask


def test_without_a_word_every_kernel_is_claimed_in_part(asked):
    report, found = asked(None)
    assert report.holds
    assert found["rms_norm", "float32"] == {PASSED}
    assert found["rms_norm", "float16"] == {DECLINED}
    assert found["silu_and_mul", "bfloat16"] == {PASSED, DECLINED}
    assert found["linear", "float32"] == {UNCLAIMED}


def test_what_is_not_claimed_is_listed_and_not_passed(asked):
    claim = Claim(dtypes=(torch.float32,))
    report, found = asked({"rms_norm": claim})
    assert report.holds
    assert found["rms_norm", "float32"] == {PASSED}
    assert found["rms_norm", "float16"] == found["silu_and_mul", "float32"] == {UNCLAIMED}


def test_a_claim_in_full_allows_no_decline(asked):
    report, found = asked({"silu_and_mul": Claim()})
    assert not report.holds
    assert found["silu_and_mul", "float32"] == {PASSED, FAILED}
    assert "the vendor claims every call, but declined this one: empty" in {
        one.detail for one in report.failures
    }


def test_a_claim_in_full_is_about_the_kernel_and_not_the_engine(monkeypatch):
    """An engine that declines the op breaks no claim, but a run in which nothing passed does not hold."""
    engine = StubEngine(refused=["dlinfer.silu_and_mul"])
    kernel = {"silu_and_mul": registry()["silu_and_mul"].reference}
    vendor = Vendor(
        "stubbed", "cpu", "", lambda: Probe(True, ""), lambda: kernel, claims=lambda: {"silu_and_mul": Claim()},
        engines=("stub",), default_engine="stub", load_engine=lambda name: engine,
    )  # fmt: skip
    monkeypatch.setitem(discovery._loaded, "stubbed", vendor)
    monkeypatch.setattr(discovery, "names", lambda: ["cpu", "reference", "stubbed"])
    both = here.run("stubbed", ops=["silu_and_mul"], checks=["values", "graph"])
    assert both.holds, both.failures
    assert {one.state for one in both.results if one.check == "graph"} == {DECLINED}
    assert "the stub has no" in next(one.detail for one in both.results if one.check == "graph")
    alone = here.run("stubbed", ops=["silu_and_mul"], checks=["graph"])
    assert not alone.holds and not alone.failures


def test_a_claim_in_part_needs_a_part(asked):
    assert asked({"silu_and_mul": Claim(in_part=True)})[0].holds
    report, _ = asked({"rms_norm": Claim(in_part=True)})
    assert {(one.op, one.dtype, one.check) for one in report.failures} == {
        ("rms_norm", dtype, "claim") for dtype in ("float16", "bfloat16")
    }


def test_a_claim_without_a_kernel_fails(asked):
    report, _ = asked({"linear": Claim()})
    assert not report.holds
    assert "no kernel" in report.failures[0].detail


def test_a_claim_of_no_op_is_an_error(asked):
    with pytest.raises(UnknownOpError, match="linaer"):
        asked({"linaer": Claim()})


def test_a_vendor_that_claims_nothing_does_not_hold(asked):
    assert not asked({"rms_norm": Claim()}, ops=["linear"])[0].holds


def test_claims_of_dlinfers_own_vendors_are_of_every_op():
    for name in ("cpu", "reference"):
        vendor = discovery.use(name)
        assert vendor.claims is None or set(vendor.claims()) == set(registry())


def test_a_copied_vendor_of_another_cache_layout_is_asked_in_its_layout(monkeypatch):
    from dlinfer.vendor import KVCacheLayout

    kernels = {name: registry()[name].reference for name in ("fill_kv_cache", "paged_decode_attention")}
    vendor = Vendor(
        "turned", "cpu", "", lambda: Probe(True, ""), lambda: kernels, kv_cache_layout=KVCacheLayout("BHSD")
    )
    monkeypatch.setitem(discovery._loaded, "turned", vendor)
    assert here.run("turned", ops=list(kernels), checks=["values", "views", "indices"]).holds
    crooked = replace(vendor, name="crooked", load_kernels=lambda: {"fill_kv_cache": _fills_as_bshd})
    monkeypatch.setitem(discovery._loaded, "crooked", crooked)
    assert not here.run("crooked", ops=["fill_kv_cache"], checks=VALUES).holds


def _fills_as_bshd(k, v, k_cache, v_cache, kv_start_indices):
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *new.shape[1:])[kv_start_indices.long()] = new
