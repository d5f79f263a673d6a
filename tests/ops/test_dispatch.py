"""Vendors' kernels behind torch's dispatcher: checked when bound, switched at run time, called from threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from dlinfer import ops, settings, vendor
from dlinfer.errors import KernelSignatureError, UnknownOpError
from dlinfer.ops.core import fallback
from dlinfer.ops.core.spec import fused_op
from dlinfer.vendor import KVCacheLayout, Probe, Vendor
from tests.ops import cases


def made(name: str, layout: KVCacheLayout | None = None, **kernels) -> Vendor:
    layout = layout or KVCacheLayout()
    return Vendor(
        name, "cpu", "made for a test", lambda: Probe(True, ""), lambda: kernels, kv_cache_layout=layout
    )


def answer(value: float):
    def silu_and_mul(x: Tensor) -> Tensor:
        return x.new_full((*x.shape[:-1], x.shape[-1] // 2), value)

    return silu_and_mul


def call() -> float:
    return float(ops.silu_and_mul(torch.ones(1, 2)))


# --- binding


def test_a_kernel_with_other_parameters_is_refused_and_changes_nothing(activate):
    activate(made("one", silu_and_mul=answer(1.0)))
    with pytest.raises(KernelSignatureError, match=r"'bad'.*'silu_and_mul' takes \('y',\).*passes \('x',\)"):
        activate(made("bad", silu_and_mul=lambda y: y))
    assert call() == 1.0
    assert vendor.active("cpu") is vendor.get("one")


def test_a_kernel_for_an_unknown_op_is_refused_naming_the_known_ones(activate):
    with pytest.raises(UnknownOpError, match=r"'bad'.*'rms_nrom'.*Known ops: .*rms_norm"):
        activate(made("bad", rms_nrom=lambda x: x))
    assert vendor.active("cpu") is vendor.get("cpu")


def test_an_op_cannot_be_defined_twice():
    def rms_norm(x: Tensor) -> Tensor:
        """Another."""
        return x

    with pytest.raises(Exception, match="rms_norm"):
        fused_op(tolerances={})(rms_norm)


# --- switching


def test_the_vendor_switches_at_run_time_for_python_and_torch_calls(activate):
    activate(made("one", silu_and_mul=answer(1.0)))
    assert call() == float(torch.ops.dlinfer.silu_and_mul(torch.ones(1, 2))) == 1.0
    activate(made("two", silu_and_mul=answer(2.0)))
    assert call() == float(torch.ops.dlinfer.silu_and_mul(torch.ones(1, 2))) == 2.0
    vendor.use("one")
    assert call() == 1.0
    vendor.use("cpu")
    assert call() == pytest.approx(0.7310586)


def test_a_compiled_graph_follows_the_switch(activate):
    activate(made("one", silu_and_mul=answer(1.0)))
    function = torch.compile(lambda x: ops.silu_and_mul(x) + 1, backend="aot_eager", fullgraph=True)
    assert float(function(torch.ones(1, 2))) == 2.0
    activate(made("two", silu_and_mul=answer(2.0)))
    assert float(function(torch.ones(1, 2))) == 3.0


# --- threads


def test_two_threads_compute_at_once():
    spec = ops.registry()["paged_decode_attention"]
    barrier = threading.Barrier(2)

    def work(seed: int) -> None:
        made_here = cases.samples(spec, torch.float32, aliased=False)
        barrier.wait()
        for sample in made_here * 5:
            want = cases.expected(spec, sample.args)
            spec.overload(*sample.args)
            cases.assert_close(cases.results(spec, sample.args, None), want, spec.tolerances[torch.float32])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def test_calls_from_a_thread_while_another_switches(activate):
    activate(made("one", silu_and_mul=answer(1.0)))
    activate(made("two", silu_and_mul=answer(2.0)))
    seen: set[float] = set()
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            seen.add(call())

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        try:
            for turn in range(200):
                vendor.use(("one", "two")[turn % 2])
        finally:
            done.set()
        running.result()
    assert seen <= {1.0, 2.0}


# --- the vendor's KV cache layout


@pytest.mark.parametrize("order", ["BHSD", "HBSD", "BSDH"])
@pytest.mark.parametrize("op", ["fill_kv_cache", "paged_prefill_attention", "paged_decode_attention"])
def test_another_cache_layout(activate, op, order):
    """The same numbers whatever the order of the dimensions in memory."""
    spec = ops.registry()[op]
    usual = [cases.expected(spec, sample.args) for sample in cases.samples(spec, torch.float32)]
    layout = KVCacheLayout(order)
    activate(made("other", layout))
    with settings.override(fallback="allow"):
        for sample, want in zip(cases.samples(spec, torch.float32), usual, strict=True):
            spec.overload(*sample.args)
            got = cases.results(spec, sample.args, None)
            if op == "fill_kv_cache":
                got = [layout.canonical(cache) for cache in got]
            cases.assert_close(got, want, spec.tolerances[torch.float32])


def test_opcheck_on_another_cache_layout(activate):
    activate(made("other", KVCacheLayout("BHSD")))
    with settings.override(fallback="allow"):
        for op in ("fill_kv_cache", "paged_decode_attention"):
            spec = ops.registry()[op]
            torch.library.opcheck(spec.overload, cases.samples(spec, torch.float32)[0].args)
    assert fallback.counts()
