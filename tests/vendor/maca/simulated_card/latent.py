"""flash_mla_cuda of MetaX's FlashMLA 1.0.1: what csrc/flash_api/flash_api.cpp checks, and what its kernels compute."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import HALVES, require

PROCESSORS = 104
"""Of the card, which the sizes of a schedule depend on."""
SCHEDULE = 8
KEYS, VALUES = 576, 512
"""The only sizes that kernels are built for."""
TILE = 16
"""Keys that are looked at together; the two halves that a sequence is split into are multiples of it."""


def get_mla_metadata(seqlens_k: Tensor, num_heads_per_head_k: int, num_heads_k: int) -> tuple[Tensor, Tensor]:
    """Made and left undefined: in this version nothing reads them."""
    _ints(num_heads_per_head_k=num_heads_per_head_k, num_heads_k=num_heads_k)
    rules.tensor("seqlens_k", seqlens_k, (torch.int32,), 1)
    require(num_heads_per_head_k > 0 and num_heads_k > 0, "numbers of heads: positive")
    parts = PROCESSORS // num_heads_k // -(-num_heads_per_head_k // 64)
    undefined = torch.full((parts, SCHEDULE), -77, dtype=torch.int32)
    return undefined, torch.full((len(seqlens_k) + 1,), -77, dtype=torch.int32)


def fwd_kvcache_mla(
    q: Tensor,
    kcache: Tensor,
    vcache_: Tensor | None,
    head_size_v: int,
    seqlens_k: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    is_causal: bool,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse). README.md: pages of a power of two."""
    require(vcache_ is None, "vcache_ is not simulated")
    _types(head_size_v, softmax_scale, is_causal)
    page = kcache.shape[1]
    require(page & (page - 1) == 0, f"pages of a power of two, not {page}")
    check(q, kcache, head_size_v, seqlens_k, block_table)
    rules.tensor("tile_scheduler_metadata", tile_scheduler_metadata, (torch.int32,), 2, empty=True)
    require(tile_scheduler_metadata.shape[1] == SCHEDULE, f"tile_scheduler_metadata: [.., {SCHEDULE}]")
    rules.tensor("num_splits", num_splits, (torch.int32,), 1)
    return attend(q, kcache, seqlens_k.tolist(), block_table, softmax_scale, is_causal)


def _ints(**given: object) -> None:
    for name, value in given.items():
        if type(value) is not int:
            raise TypeError(f"incompatible function arguments: {name} is an int, not {value!r}")


def _types(head_size_v: object, softmax_scale: object, is_causal: object) -> None:
    """What pybind11 converts, and what not."""
    _ints(head_size_v=head_size_v)
    if type(softmax_scale) not in (int, float) or type(is_causal) is not bool:
        raise TypeError("incompatible function arguments: softmax_scale is a float, is_causal a bool")


def check(q: Tensor, kcache: Tensor, head_size_v: int, seqlens_k: Tensor, block_table: Tensor) -> None:
    """The rules that DeepSeek's later source has as well."""
    rules.tensor("q", q, HALVES, 4, gaps=True)
    rules.tensor("kcache", kcache, HALVES, 4, gaps=True)
    rules.same_dtype(q=q, kcache=kcache)
    for name, x in (("q", q), ("kcache", kcache)):
        require(x.stride(-1) == 1, f"{name}: contiguous last dimension")
        apart = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])
        require(apart, f"{name}: rows begin at multiples of 16 bytes, which vectors are read from")
    batch, _, heads, size = q.shape
    require(size == KEYS and kcache.shape[3] == KEYS, f"head_size: {KEYS}, not {size} and {kcache.shape[3]}")
    require(head_size_v == VALUES, f"head_size_v: {VALUES}, not {head_size_v}")
    require(heads % kcache.shape[2] == 0, f"{heads} heads over {kcache.shape[2]}")
    rules.tensor("seqlens_k", seqlens_k, (torch.int32,), 1)
    rules.shape("seqlens_k", seqlens_k, (batch,))
    rules.tensor("block_table", block_table, (torch.int32,), 2, gaps=True)
    require(block_table.stride(-1) == 1, "block_table: contiguous last dimension")
    require(block_table.shape[0] == batch, f"block_table: {batch} rows")


def attend(
    q: Tensor, kcache: Tensor, lengths: list[int], table: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Each sequence in two halves, whose float32 results are put together; weights are rounded before values meet them.

    A query that sees no key gives zeros, and infinity for its lse.
    """
    batch, queries, heads, _ = q.shape
    page, group = kcache.shape[1], heads // kcache.shape[2]
    out = torch.empty(batch, queries, heads, VALUES, dtype=q.dtype)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32)
    for row, length in enumerate(lengths):
        require(
            0 <= length <= table.shape[1] * page, f"seqlens_k: up to {table.shape[1] * page}, not {length}"
        )
        blocks = table[row, : -(-length // page)].long()
        rules.within("block_table", blocks, 0, kcache.shape[0] - 1)
        keys = kcache[blocks].reshape(-1, *kcache.shape[2:])[:length].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[row].float(), keys) * scale
        if causal and queries > 1:
            away = torch.arange(length) - (torch.arange(queries).view(-1, 1) + length - queries)
            scores = scores.masked_fill(away > 0, -torch.inf)
        tiles = -(-length // TILE)
        half = -(-tiles // 2) * TILE
        parts = [
            _part(scores[..., some], keys[some], q.dtype) for some in (slice(0, half), slice(half, None))
        ]
        sums = torch.stack([one[1] for one in parts])
        total = torch.logsumexp(sums, 0)
        shares = torch.exp(sums - total.masked_fill(total == -torch.inf, torch.inf))
        found = sum(share.unsqueeze(-1) * one[0] for share, one in zip(shares, parts, strict=True))
        out[row] = torch.as_tensor(found).transpose(0, 1).to(q.dtype)
        lse[row] = total.masked_fill(total == -torch.inf, torch.inf)
    return out, lse


def _part(scores: Tensor, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(result [heads, queries, 512], lse [heads, queries]) of some keys, in float32."""
    if not scores.shape[-1]:
        nothing = torch.zeros(*scores.shape[:2], VALUES)
        return nothing, torch.full(scores.shape[:2], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    found = torch.einsum("hqk,khd->hqd", weights.to(dtype).float(), keys[..., :VALUES])
    return found / total.masked_fill(total == 0, 1.0), (top + torch.log(total)).squeeze(-1)
