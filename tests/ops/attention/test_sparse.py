"""Sparse attention against dense attention in float64, and the indexer's choice against sorting; through LMDeploy."""

import numpy as np
import pytest
import torch
from lmdeploy.pytorch.kernels.dlinfer import lightning_indexer
from lmdeploy.pytorch.kernels.dlinfer.sparse_attention import sparse_attention_fwd
from torch import Tensor

from dlinfer import ops, vendor
from dlinfer.ops.attention import sparse as sparse_attention
from dlinfer.vendor.cpu.sparse import attention as cpu_kernels
from tests.ops import dense_oracle

HEADS, SIZE, ROPE, BLOCK = 3, 8, 4, 4
Q_LENS, KV_LENS = [5, 1, 9], [5, 14, 11]


class Step:
    """Three sequences in pages whose unwritten slots hold NaN."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tokens = sum(Q_LENS)
        self.table = torch.randperm(12).view(3, 4)
        self.q_ends, self.kv_lens = torch.tensor(Q_LENS).cumsum(0), torch.tensor(KV_LENS)
        self.latent = [torch.randn(count, SIZE) for count in KV_LENS]
        self.turned = [torch.randn(count, ROPE) for count in KV_LENS]

    def paged(self, rows: list[Tensor]) -> Tensor:
        cache = torch.full((12, BLOCK, 1, rows[0].shape[1]), torch.nan)
        for blocks, own in zip(self.table, rows, strict=True):
            for position, row in enumerate(own):
                cache[blocks[position // BLOCK], position % BLOCK, 0] = row
        return cache

    def positions(self) -> list[tuple[int, int]]:
        """(sequence, position) of each query."""
        return [
            (b, kv - q + i) for b, (q, kv) in enumerate(zip(Q_LENS, KV_LENS, strict=True)) for i in range(q)
        ]


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_the_indexer_chooses_the_highest_scores_up_to_the_query(vendor_name: str, count: int) -> None:
    vendor.use(vendor_name)
    step = Step()
    q, weights = torch.randn(step.tokens, HEADS, SIZE), torch.randn(step.tokens, HEADS)
    cache = step.paged(step.latent)
    got = lightning_indexer(q, cache, weights, step.q_ends, step.kv_lens, step.table, count)
    assert got.shape == (step.tokens, 1, count)
    assert got.dtype is torch.int32
    for token, (sequence, own) in enumerate(step.positions()):
        keys = step.latent[sequence][: own + 1].double().numpy()
        products = np.maximum(q[token].double().numpy() @ keys.T, 0)
        scores = weights[token].double().numpy() @ products
        best = sorted(range(own + 1), key=lambda position: (-scores[position], position))[:count]
        assert got[token, 0].tolist() == sorted(best) + [-1] * (count - len(best))


@pytest.mark.parametrize("held", [1, 100])
def test_a_few_queries_at_a_time_give_what_all_at_once_do(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """held: numbers that one product may have; 1 means one query after the other."""
    vendor.use("cpu")
    step = Step()
    q, weights = torch.randn(step.tokens, HEADS, SIZE), torch.randn(step.tokens, HEADS)
    latent, turned = step.paged(step.latent), step.paged(step.turned)
    lengths = (step.table, step.q_ends, step.kv_lens)

    def both() -> tuple[Tensor, Tensor]:
        chosen = lightning_indexer(q, latent, weights, step.q_ends, step.kv_lens, step.table, 4)[:, 0]
        rest = {"value_head_size": SIZE, "softmax_scale": 0.3}
        query = torch.cat((q, q[..., :ROPE]), -1)
        return chosen, sparse_attention_fwd(query, turned, latent, chosen, *lengths, **rest)

    chosen, attended = both()
    monkeypatch.setattr(sparse_attention, "_SCORED", held)
    monkeypatch.setattr(cpu_kernels, "_GATHERED", held)
    again = both()
    assert torch.equal(again[0], chosen)
    torch.testing.assert_close(again[1], attended, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
@pytest.mark.parametrize("count", [3, 20])
def test_attention_to_chosen_positions_is_dense_attention_to_them(vendor_name: str, count: int) -> None:
    vendor.use(vendor_name)
    step = Step()
    q = torch.randn(step.tokens, HEADS, SIZE + ROPE)
    chosen = torch.full((step.tokens, count), -1)
    for token, (_, own) in enumerate(step.positions()):
        there = torch.randperm(own + 1)[: min(count, own + 1)]
        chosen[token, torch.randperm(count)[: len(there)]] = there  # holes anywhere
    latent, turned = step.paged(step.latent), step.paged(step.turned)
    lengths = (step.table, step.q_ends, step.kv_lens)
    got = sparse_attention_fwd(q, turned, latent, chosen, *lengths, value_head_size=SIZE, softmax_scale=0.3)
    for token, (sequence, _) in enumerate(step.positions()):
        places = chosen[token][chosen[token] >= 0]
        values = step.latent[sequence][places]
        keys = torch.cat([values, step.turned[sequence][places]], dim=-1)
        arrays = [x.double().numpy() for x in (q[token : token + 1], keys[:, None], values[:, None])]
        want = dense_oracle.attention(*arrays, scale=0.3, causal=False)
        np.testing.assert_allclose(got[token : token + 1].numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
def test_a_token_that_sees_nothing_gets_zeros(vendor_name: str) -> None:
    vendor.use(vendor_name)
    step = Step()
    latent, turned = step.paged(step.latent), step.paged(step.turned)
    chosen = torch.full((step.tokens, 1, 2), -1)
    chosen[0] = 4  # behind the query's own position
    q, q_rope = torch.randn(step.tokens, HEADS, SIZE), torch.randn(step.tokens, HEADS, ROPE)
    out = ops.sparse_flash_attention(
        q, latent, latent, chosen, 1.0, step.table, step.q_ends, step.kv_lens, q_rope, turned
    )
    assert torch.equal(out, torch.zeros_like(out))
