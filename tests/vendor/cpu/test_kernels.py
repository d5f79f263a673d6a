"""The cpu vendor's kernels: vectorised, without copies of caches or weights, right on any strides."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlinfer import ops, vendor
from dlinfer.ops.attention.semantics import Scoring
from dlinfer.vendor.cpu.attention import piecewise_prefill as by_torch
from dlinfer.vendor.cpu.attention.kv_cache import Pages
from dlinfer.vendor.cpu.kernels import KERNELS

BLOCK = 16


class Recorder(TorchDispatchMode):
    """The aten ops a block of code calls, and the sizes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.called.append(str(func))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.numel())
        return out


def decode(batch: int, kv_len: int, blocks: int = 0, **extras) -> Recorder:
    per_sequence = -(-kv_len // BLOCK)
    cache = torch.randn(2, max(blocks, batch * per_sequence), BLOCK, 2, 32)
    table = torch.arange(batch * per_sequence).view(batch, per_sequence)
    lengths = torch.full((batch,), kv_len)
    q = torch.randn(batch, 4, 32)
    out = torch.empty_like(q)
    defaults = {
        "softmax_scale": 0.2,
        "window_left": -1,
        "logit_softcapping": 0.0,
        "alibi_slopes": None,
        "sinks": None,
    }
    call = (q, cache[0], cache[1], table, BLOCK, lengths, kv_len, 4, 2, out)
    with Recorder() as recorder:
        KERNELS["paged_decode_attention"](*call, *(defaults | extras).values())
    want = torch.empty_like(q)
    ops.paged_decode_attention.reference(*call[:-1], want, *(defaults | extras).values())
    torch.testing.assert_close(out, want)
    return recorder


def moe(tokens: int, experts: int, size: int = 32) -> Recorder:
    x, ids = torch.randn(tokens, size), torch.randn(tokens, experts).topk(2).indices
    gate_up, down = torch.randn(experts, 2 * size, size), torch.randn(experts, size, size)
    call = (x, gate_up, down, torch.rand(tokens, 2), ids, 2, True)
    with Recorder() as recorder:
        got = KERNELS["fused_moe"](*call)
    torch.testing.assert_close(got, ops.fused_moe.reference(*call), rtol=1e-4, atol=1e-4)
    return recorder


# --- no Python loops in decode


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"window_left": 20},
        {"logit_softcapping": 5.0},
        {"sinks": torch.ones(4), "alibi_slopes": torch.ones(4)},
    ],
    ids=["plain", "window", "soft-cap", "sinks and alibi"],
)
def test_decode_attention_calls_as_many_ops_for_32_sequences_as_for_2(extras):
    assert decode(32, 70, **extras).called == decode(2, 70, **extras).called


def test_fill_kv_cache_calls_as_many_ops_for_32_tokens_as_for_1():
    called = []
    for tokens in (1, 32):
        states, cache = torch.randn(tokens, 2, 8), torch.zeros(4, BLOCK, 2, 8)
        with Recorder() as recorder:
            KERNELS["fill_kv_cache"](states, states, cache, cache.clone(), torch.arange(tokens))
        called.append(recorder.called)
    assert called[0] == called[1]


def test_fused_moe_calls_as_many_ops_for_64_experts_as_for_4():
    assert moe(3, 64).called == moe(3, 4).called
    assert moe(3, 64).called == moe(50, 64).called


# --- no copies of what is large


def test_decode_attention_copies_the_blocks_it_reads_not_the_cache():
    assert decode(2, 30, blocks=500).largest <= 2 * 32 * 2 * 32


def test_decode_attention_reads_only_the_blocks_of_the_window():
    wide, narrow = decode(1, 640), decode(1, 640, window_left=20)
    assert narrow.largest * 10 <= wide.largest


def test_prefill_reads_only_the_blocks_of_the_window():
    cache, q = torch.randn(2, 40, BLOCK, 2, 32), torch.randn(4, 4, 32)
    call = (
        q,
        cache[0],
        cache[1],
        torch.arange(40)[None],
        BLOCK,
        torch.tensor([4]),
        torch.tensor([640]),
        4,
        640,
        4,
        2,
    )
    extras = (0.2, True, 20, -1, 0.0, None, None)
    got, want = torch.empty_like(q), torch.empty_like(q)
    caches, ends, lengths = (Pages(cache[0]), Pages(cache[1])), *call[5:7]
    with Recorder() as recorder:
        by_torch.piecewise_paged_prefill(q, caches, call[3], ends, lengths, got, Scoring(*extras))
    assert recorder.largest <= 3 * BLOCK * 2 * 32
    ops.paged_prefill_attention.reference(*call, want, *extras)
    torch.testing.assert_close(got, want)


def test_fused_moe_copies_no_weights():
    assert moe(3, 64).largest < 64 * 32 * 32


@pytest.mark.parametrize("size", [32, 19], ids=["grouped product", "sizes that it does not take"])
def test_fused_moe_with_experts_that_get_nothing(size):
    moe(2, 24, size)


# --- strides


def test_caches_that_are_slices_of_a_pool():
    """LMDeploy keeps all layers' caches in one pool, so a layer's blocks need not be adjacent."""
    vendor.use("cpu")
    pool = torch.zeros(6, 3, BLOCK, 2, 8)
    k_cache, v_cache = pool[:, 0], pool[:, 2]
    k, v = torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    table = torch.tensor([[4, 1]])
    slots = torch.cat([torch.arange(16) + 64, torch.arange(4) + 16])
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[table[0]].flatten(0, 1)[:20], k)
    assert not pool[:, 1].any()
    length, q = torch.tensor([20]), torch.randn(1, 4, 8)
    got = ops.paged_decode_attention(q, k_cache, v_cache, table, BLOCK, length, length, 20, 4, 2)
    want = torch.empty_like(q)
    call = (q, k_cache, v_cache, table, BLOCK, length, 20, 4, 2, want)
    ops.paged_decode_attention.reference(*call, 8**-0.5, -1, 0.0, None, None)
    torch.testing.assert_close(got, want)


# --- pieces and groups


@pytest.mark.parametrize("scores", [1, 100, 1 << 24])
@pytest.mark.parametrize(
    "bounds", [(True, -1, -1), (True, 4, -1), (False, 2, 3), (False, 0, 0), (False, -1, -1)]
)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_prefill_gives_the_same_in_any_number_of_pieces(monkeypatch, scores, bounds, softcap):
    monkeypatch.setattr(by_torch, "_SCORES_AT_A_TIME", scores)
    monkeypatch.setattr(by_torch, "_ROWS_AT_LEAST", 3)
    q, k, v = torch.randn(9, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    lengths = (torch.tensor([9]), torch.tensor([12]))
    got, want = torch.empty_like(q), torch.empty_like(q)
    causal, left, right = bounds
    rules = Scoring(0.25, causal, left, right, softcap, torch.rand(4), torch.rand(4))
    by_torch.piecewise_prefill(q, k, v, *lengths, got, rules)
    ops.prefill_attention.reference(q, k, v, *lengths, 9, 4, 2, want, *rules)
    torch.testing.assert_close(got, want)


def test_prefill_with_a_window_makes_no_mask_of_all_keys():
    q, k, v = torch.randn(1024, 2, 8), torch.randn(1024, 2, 8), torch.randn(1024, 2, 8)
    lengths, out = torch.tensor([1024]), torch.empty_like(q)
    with Recorder() as recorder:
        rules = Scoring(0.3, True, 100, -1, 0.0, None, None)
        by_torch.piecewise_prefill(q, k, v, lengths, lengths, out, rules)
    assert recorder.largest <= 128 * (128 + 100)


@pytest.mark.parametrize("window", [-1, 40])
def test_ragged_decode_batches_fall_into_groups(window):
    """One long sequence among short and empty ones: each group is padded to its own longest."""
    lengths = torch.tensor([1000, 3, 0, 17, 64, 65, 1, 500])
    table = torch.randperm(8 * 63).view(8, 63)
    cache, q = torch.randn(2, 8 * 63, BLOCK, 2, 8), torch.randn(8, 4, 8)
    call = (q, cache[0], cache[1], table, BLOCK, lengths, 1000, 4, 2)
    extras = (0.3, window, 0.0, None, torch.randn(4))
    want = torch.empty_like(q)
    ops.paged_decode_attention.reference(*call, want, *extras)
    with Recorder() as recorder:
        KERNELS["paged_decode_attention"](*call, q, *extras)  # into q itself
    torch.testing.assert_close(q, want)
    assert recorder.largest <= 2 * 63 * BLOCK * 2 * 8


def test_large_scores_do_not_overflow():
    q, k, v = 300 * torch.randn(5, 4, 16), 300 * torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    lengths = torch.tensor([5])
    for softcap in (0.0, 1e5):
        for sinks in (None, torch.full((4,), 1e4)):
            got, want = torch.empty_like(q), torch.empty_like(q)
            extras = (1.0, True, -1, -1, softcap, None, sinks)
            KERNELS["prefill_attention"](q, k, v, lengths, lengths, 5, 4, 2, got, *extras)
            ops.prefill_attention.reference(q, k, v, lengths, lengths, 5, 4, 2, want, *extras)
            assert got.isfinite().all()
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
