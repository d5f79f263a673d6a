"""The openvino vendor's eager kernels: the cpu vendor's, on caches that lie as OpenVINO's attention needs them."""

from dataclasses import replace

import pytest
import torch

from dlinfer import ops
from dlinfer.ops.core import fallback
from dlinfer.vendor import Probe, discovery
from dlinfer.vendor.cpu.kernels import KERNELS
from dlinfer.vendor.openvino import VENDOR
from dlinfer.vendor.openvino.kernels import LAYOUT, kernels
from tests.ops import cases

CACHED = (
    "fill_kv_cache",
    "paged_prefill_attention",
    "paged_decode_attention",
    "fill_quantised_kv_cache",
    "quantised_paged_prefill_attention",
    "quantised_paged_decode_attention",
)


@pytest.fixture
def active(monkeypatch):
    """The vendor is active, also where the package openvino, which its kernels do not need, is not installed."""
    there = replace(VENDOR, probe=lambda: Probe(True, "made for a test"))
    monkeypatch.setitem(discovery._loaded, "openvino", there)
    before = discovery.activate_default("cpu")
    assert before is not None
    discovery.use("openvino")
    fallback.reset()
    yield
    discovery.use(before.name)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("op", CACHED)
def test_kernels_of_the_cache(op):
    """Every sample, against the reference in float64, natively."""
    spec = ops.registry()[op]
    for sample in cases.samples(spec, torch.float32):
        want = cases.expected(spec, sample.args)
        spec.overload(*sample.args)
        cases.assert_close(cases.results(spec, sample.args, None), want, spec.tolerances[torch.float32])
    assert fallback.counts() == {}


@pytest.mark.usefixtures("active")
def test_calls_by_keyword_see_views_too():
    spec = ops.registry()["fill_kv_cache"]
    sample = cases.samples(spec, torch.float32)[0]
    want = cases.expected(spec, sample.args)
    given = dict(zip(spec.parameters, sample.args, strict=True))
    rest = {name: given.pop(name) for name in ("v_cache", "kv_start_indices")}
    kernels()["fill_kv_cache"](*given.values(), **rest)
    cases.assert_close(cases.results(spec, sample.args, None), want, spec.tolerances[torch.float32])


def test_other_kernels_are_the_cpu_vendor_s_own():
    assert {name for name, kernel in kernels().items() if kernel is not KERNELS[name]} == set(CACHED)


def test_the_layout():
    assert VENDOR.kv_cache_layout == LAYOUT
    assert LAYOUT.shape(7, 32, 2, 16) == (7, 2, 32, 16)
