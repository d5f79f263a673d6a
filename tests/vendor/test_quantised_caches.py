"""Every graph engine with quantised KV caches: inductor's calls the kernels, the others refuse the ops by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlinfer.graph  # noqa: F401 - the backend of torch.compile
from dlinfer import ops, settings
from dlinfer.errors import GraphFallbackError
from dlinfer.ops.core import fallback
from dlinfer.vendor import discovery
from tests.graph.conftest import artifact_folder, graph_mode
from tests.vendor.regions import refused_by, region_of

__all__ = ["artifact_folder", "graph_mode"]

BLOCK, HEADS, KV_HEADS, SIZE = 16, 4, 2, 16
DTYPES = {8: torch.uint8, 4: torch.uint8, 16: torch.float8_e4m3fn, 17: torch.float8_e5m2}
OPS = {
    "dlinfer.fill_quantised_kv_cache.default",
    "dlinfer.quantised_paged_prefill_attention.default",
    "dlinfer.quantised_paged_decode_attention.default",
}


def step(policy: int):
    """A function that writes a cache and attends to it in both ways, in the layout of the active vendor."""

    def run(
        q: Tensor,
        k: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scales: Tensor,
        v_scales: Tensor,
        *rest: Tensor,
    ):
        slots, table, ends, lengths = rest
        ops.fill_kv_cache(k, -k, k_cache, v_cache, slots, k_scales, v_scales, quant_bits=policy)
        pages = (k_cache, v_cache, table, BLOCK, ends, lengths)
        scales = {"k_scales_zeros": k_scales, "v_scales_zeros": v_scales, "quant_bits": policy}
        first = ops.paged_prefill_attention(q, k, -k, *pages, 1, 40, HEADS, KV_HEADS, (), **scales)
        second = ops.paged_decode_attention(q + 1, *pages, 40, HEADS, KV_HEADS, **scales)
        return first * 2 + second

    return run


def arguments(policy: int) -> list[Tensor]:
    """Of a step: two sequences of one new token each, behind 4 and 20 others whose keys are code 7."""
    torch.manual_seed(0)
    size = SIZE // 2 if policy == 4 else SIZE
    shape = (5, BLOCK, KV_HEADS)
    if discovery.kv_orders.get("cpu", "BSHD") == "BHSD":
        shape = (5, KV_HEADS, BLOCK)
    caches = [torch.full((*shape, size), 7, dtype=torch.uint8).view(DTYPES[policy]) for _ in range(2)]
    scales = [torch.ones(()) if policy > 8 else torch.rand(*shape, 2) for _ in range(2)]
    table, lengths = torch.tensor([[3, 0], [1, 4]]), torch.tensor([5, 21])
    slots = torch.tensor([3 * BLOCK + 4, 4 * BLOCK + 4])
    k = torch.randn(2, KV_HEADS, SIZE)
    return [torch.randn(2, HEADS, SIZE), k, *caches, *scales, slots, table, torch.tensor([1, 2]), lengths]


def others() -> dict[str, Any]:
    """Name -> the vendor of each engine but inductor."""
    vendors = [discovery.get(name) for name in discovery.names()]
    return {engine: vendor for vendor in vendors for engine in vendor.engines if engine != "inductor"}


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        if one.itemsize == 1:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        else:
            torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("policy", [8, *(pytest.param(one, marks=pytest.mark.full) for one in (4, 16, 17))])
def test_inductor_calls_the_kernels(policy):
    want, given = arguments(policy), arguments(policy)
    expected = step(policy)(*want)
    run = torch.compile(step(policy), backend="dlinfer", fullgraph=True, options={"engine": "inductor"})
    with settings.override(fallback="error"):
        got = run(*given)
    same([got, *given], [expected, *want])
    assert fallback.counts() == {}


@pytest.mark.parametrize("policy", [8, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", sorted(others()))
def test_other_engines_refuse_each_op_by_its_name(name, policy):
    region = region_of(step(policy), arguments(policy), lambda index, size: False)
    try:
        engine = others()[name].load_engine(name)  # which needs no device, and of most no toolchain
    except ImportError as missing:  # Ascend's asks torchair: tests/vendor/ascend/graph/checks_refusals.py
        pytest.skip(f"the engine's own front end is not installed: {missing}")
    reasons = refused_by(engine, region)
    assert set(reasons) >= OPS
    assert all(reasons[op] for op in OPS)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("name", [pytest.param("onnxruntime", marks=pytest.mark.full), "openvino"])
def test_what_an_engine_refuses_is_counted_or_an_error(name):
    if name not in others():
        pytest.skip(f"no vendor of the engine {name}")
    active = discovery.activate_default("cpu")
    assert active is not None
    discovery.use(name if name == "openvino" else "cpu")  # whose caches lie otherwise
    try:
        want, given = arguments(8), arguments(8)
        expected = step(8)(*want)
        run = torch.compile(step(8), backend="dlinfer", fullgraph=True, options={"engine": name})
        same([run(*given), *given], [expected, *want])
        assert any("quantised" in f"{kind.op} {kind.reason}" for kind in fallback.counts())
        torch._dynamo.reset()
        with settings.override(fallback="error"), pytest.raises(GraphFallbackError, match="quantised"):
            torch.compile(step(8), backend="dlinfer", fullgraph=True, options={"engine": name})(*arguments(8))
    finally:
        discovery.use(active.name)
