"""Writes into the paged KV cache."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import FLOATS, require

_SCATTERED = (*FLOATS, torch.bool, torch.int64, torch.int8)


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None,
    compress_seq_offsets: Tensor | None,
    seq_lens: Tensor | None,
    cache_mode: str | None,
) -> None:
    rules.unused(compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    rules.one_of("cache_mode, since all lies as ND", cache_mode, [None, "Norm"])
    for name, x, dims in (
        ("key", key, 3),
        ("value", value, 3),
        ("key_cache", key_cache, 4),
        ("value_cache", value_cache, 4),
    ):
        rules.tensor(name, x, FLOATS, dims)
    rules.same_dtype(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    rules.tensor("slot_mapping", slot_mapping, (torch.int32, torch.int64), 1)
    tokens, heads, _ = key.shape
    rules.shape("slot_mapping", slot_mapping, (tokens,))
    rules.shape("value", value, (tokens, heads, value.shape[2]))
    for name, new, cache in (("key_cache", key, key_cache), ("value_cache", value, value_cache)):
        rules.shape(name, cache, (*key_cache.shape[:2], heads, new.shape[2]))
    slots = slot_mapping.long()
    rules.within("slot_mapping", slots, 0, key_cache.shape[0] * key_cache.shape[1] - 1)
    _, which, counts = slots.unique(return_inverse=True, return_counts=True)
    twice = counts[which] > 1  # what stands there then is not said; LMDeploy's warm-up does so
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = new.masked_fill(twice.view(-1, 1, 1), torch.nan)


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    rules.tensor("input", input, _SCATTERED, (1, 8), gaps=True)
    rules.tensor("indices", indices, (torch.int32, torch.int64), (2, 8), gaps=True)
    rules.tensor("updates", updates, _SCATTERED, (1, 8), gaps=True)
    rules.same_dtype(input=input, updates=updates)
    depth = indices.shape[-1]
    require(depth <= input.dim(), "indices: a last size of at most the input's dimensions")
    rules.shape("updates", updates, (*indices.shape[:-1], *input.shape[depth:]))
    for dim in range(depth):
        rules.within(f"indices of dimension {dim}", indices[..., dim], 0, input.shape[dim] - 1)
    input[tuple(indices.long().unbind(-1))] = updates
    return input
