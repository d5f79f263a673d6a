"""A compiled write of a KV cache goes where the active vendor lays it, also when that changes after compiling."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from dlinfer.errors import KVLayoutChangedError
from dlinfer.graph.bound_call.capture import capture_call
from dlinfer.graph.engine import find_engine
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.ops import fill_kv_cache
from dlinfer.vendor import KVCacheLayout, Probe, Vendor, discovery

pytestmark = pytest.mark.usefixtures("graph_mode")

HEADS, SIZE = 32, 8  # as many heads as slots in a block: a cache of either layout has the same sizes
K, V = torch.randn(3, HEADS, SIZE), torch.randn(3, HEADS, SIZE)
SLOTS = torch.tensor([1, 5, 40])
INDUCTOR: dict[str, Any] = {"engine": "inductor"}


@pytest.fixture
def other(monkeypatch):
    """A function that makes a vendor of the CPU active, which lays caches out as [blocks, heads, slots, size]."""
    discovery.use("cpu")
    layout = KVCacheLayout("BHSD")

    def kernels():
        def fill_kv_cache(k, v, k_cache, v_cache, kv_start_indices):
            for cache, new in ((k_cache, k), (v_cache, v)):
                layout.canonical(cache)[kv_start_indices // HEADS, kv_start_indices % HEADS] = new

        return {"fill_kv_cache": fill_kv_cache}

    vendor = Vendor("other", "cpu", "", lambda: Probe(True, ""), kernels, kv_cache_layout=layout)
    monkeypatch.setitem(discovery._loaded, "other", vendor)
    yield lambda: discovery.use("other")
    discovery.use("cpu")


def write(k: torch.Tensor, v: torch.Tensor, caches: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return fill_kv_cache(k, v, caches[0], caches[1], slots)[0].sum()


def caches() -> torch.Tensor:
    return torch.zeros(2, 2, HEADS, HEADS, SIZE)


def expected() -> torch.Tensor:
    made = caches()
    write(K, V, made, SLOTS)
    return made


@torch.no_grad()
def test_a_model_is_compiled_again_for_another_layout(other):
    compiled: Any = torch.compile(write, backend="dlinfer", fullgraph=True, options=INDUCTOR)
    for activated in (None, other, lambda: discovery.use("cpu")):
        if activated is not None:
            activated()
        given = caches()
        compiled(K, V, given, SLOTS)
        assert torch.equal(given, expected())


@torch.no_grad()
def test_the_first_activation_compiles_nothing_again(monkeypatch):
    """It happens while the call is traced, before Dynamo notes what it guards."""
    monkeypatch.setattr(discovery, "_active", {})
    monkeypatch.setattr(discovery, "kv_orders", {})
    made: list[fx.GraphModule] = []

    def counting(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made.append(graph_module)
        return graph_module.forward

    compiled: Any = torch.compile(write, backend=counting, fullgraph=True)
    for _ in range(3):
        compiled(K, V, caches(), SLOTS)
    assert len(made) == 1


@torch.no_grad()
def test_what_dynamo_does_not_guard_says_so(other):
    """The torch op itself, without dlinfer's Python call in front of it."""

    def write_by_op(k, v, one, two, slots):
        return torch.ops.dlinfer.fill_kv_cache(k, v, one, two, slots)

    compiled: Any = torch.compile(write_by_op, backend="dlinfer", options=INDUCTOR)
    compiled(K, V, *caches(), SLOTS)
    other()
    given = caches()
    with pytest.raises(KVLayoutChangedError, match=r"BSHD.*vendor 'other'.*BHSD"):
        compiled(K, V, *given, SLOTS)
    assert not given.any()


def test_a_direct_call_and_what_is_stored_say_so(other, tmp_path):
    given = caches()
    arguments = {"k": K, "v": V, "caches": given, "slots": SLOTS}
    call, _ = capture_call(
        write, arguments, steady=list(arguments), options=CompileOptions(engine="inductor")
    )
    assert torch.equal(given, expected())
    stored = call.program.to_dict()
    other()
    with pytest.raises(KVLayoutChangedError):
        call(k=K, v=V, caches=given, slots=SLOTS)
    with pytest.raises(KVLayoutChangedError):
        CompiledGraph.from_dict(stored, find_engine("inductor", "cpu"), tmp_path)
