"""Calls of the attention ops and of experts in sizes that models have, of the interface's own tables of cases."""

from collections.abc import Iterator

import torch

from dlinfer.ops.attention import samples as attention_samples
from dlinfer.ops.attention.samples import Case
from dlinfer.ops.core.samples import SampleMaker
from tests.vendor.ascend.real_sizes import (
    Call,
    decode,
    latent,
    latent_paged_prompt,
    latent_prompt,
    paged_prefill,
    prefill,
    served,
)

_LATENT = {"sizes": (576, 576), "block_size": 16}
LATENT = (
    ("paged_decode_attention", latent, Case("latent", (1, 1, 1), (130, 1, 48), heads=(128, 1), **_LATENT)),
    ("prefill_attention", latent_prompt, Case("latent", (16, 1, 33), heads=(16, 1), **_LATENT)),
    ("paged_prefill_attention", latent_paged_prompt, Case("latent", (17, 1), (48, 33), (16, 1), **_LATENT)),
)
"""Over DeepSeek's cache of 512 numbers, which are values, and 64 that are rotated: all of them are keys."""


def experts(make: SampleMaker) -> tuple:
    """fused_moe of 60 experts for 17 tokens, of which some choose one expert twice."""
    weights = make.tensor(60, 2 * 96, 128, scale=128**-0.5), make.tensor(60, 128, 96, scale=96**-0.5)
    return (
        make.tensor(17, 128),
        *weights,
        make.tensor(17, 4).softmax(-1),
        make.integers(0, 60, 17, 4),
        4,
        True,
    )


def linear(make: SampleMaker) -> tuple:
    """A projection with a bias."""
    return make.tensor(130, 896), make.tensor(1152, 896, scale=896**-0.5), make.tensor(1152)


def rotation(make: SampleMaker) -> tuple:
    """q and k side by side, as a projection leaves them."""
    packed, angles = make.tensor(130, 14 + 2 + 2, 128), make.tensor(130, 128, scale=3.0)
    return packed[:, :14], packed[:, 14:16], angles.cos(), angles.sin()


def latents(make: SampleMaker) -> tuple:
    """fill_kv_cache of a latent cache, as LMDeploy calls it: values are not the keys' memory, though their numbers."""
    keys, cache = make.tensor(7, 1, 576), make.cache(4, 16, 1, 576)
    return (
        keys,
        keys[..., :512].clone(),
        cache,
        cache[..., :512],
        torch.arange(60, 53, -1, device=keys.device),
    )


def calls() -> Iterator[Call]:
    """All of them."""
    for op, made, table, sizes in (
        ("prefill_attention", prefill, attention_samples.PREFILL, (128, 64)),
        ("paged_prefill_attention", paged_prefill, attention_samples.PAGED_PREFILL, (128, 64)),
        ("paged_decode_attention", decode, attention_samples.DECODE, (128, 64)),
    ):
        for size in sizes:
            for case in served(table, 16, size):
                name = f"{case.name}, heads of {size}"
                yield Call(op, name, lambda make, made=made, case=case: made(make, case))
    for op, made, case in LATENT:
        yield Call(op, "latent", lambda make, made=made, case=case: made(make, case))
    yield Call("fill_kv_cache", "latent", latents)
    yield Call("fused_moe", "60 experts", experts)
    yield Call("linear", "a projection with a bias", linear)
    yield Call("apply_rotary_pos_emb", "a packed projection", rotation)
