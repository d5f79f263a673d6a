"""Whole blocks of models for engines to compile: several ops together, in one prefill and two decoding steps.

Each block is a function of its inputs, weights and caches, and calls ops as serving frameworks do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer import ops
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.utils.type_annotation import MoeMetadata
from dlinfer.vendor.claims import compute_dtypes

DTYPES = compute_dtypes()
HIDDEN, HEADS, KV_HEADS, SIZE, WIDE, EXPERTS, TOP, VOCABULARY = 32, 4, 2, 16, 48, 4, 2, 64
RANK, TURNED = 32, 16
"""Two sizes in latent attention. RANK: the size of a token's latent vector.

TURNED: the size of the part of a token's key that rotary embedding rotates.
"""
LENGTHS = (5, 9, 1)
"""The number of tokens of each prompt or, in a vision tower, the number of patches of each image."""
CACHES = ("k_cache", "v_cache", "latent_cache")
"""The names of the caches among the inputs of a step."""

Weights = dict[str, Tensor]
Step = dict[str, Any]
Block = Callable[[Tensor, Weights, Step], Tensor]


@dataclass(frozen=True)
class Blocks:
    """A function that runs one block of a model, with facts for checking it.

    dtypes: the dtypes to check. A block with experts is checked only in float32: rounding may select other experts.
    """

    name: str
    run: Block
    dtypes: tuple[torch.dtype, ...] = DTYPES
    takes_tokens: bool = False


def mlp(x: Tensor, w: Weights, step: Step) -> Tensor:
    gated = ops.silu_and_mul(ops.linear(ops.rms_norm(x, w["norm"], 1e-6), w["gate_up"], None, False))
    return x + ops.linear(gated, w["down"], None, False)


def attention(x: Tensor, w: Weights, step: Step) -> Tensor:
    """Write the new tokens to the paged cache, then attend over it."""
    h, lengths, ends = ops.rms_norm(x, w["norm"], 1e-6), step["lengths"], step["ends"]
    qkv = ops.linear(h, w["qkv"], w["bias"], False).view(-1, HEADS + 2 * KV_HEADS, SIZE)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    q, k = ops.apply_rotary_pos_emb(q, k, step["cos"], step["sin"], None, None)
    caches = ops.fill_kv_cache(k, v, step["k_cache"], step["v_cache"], step["slots"], [], [], quant_bits=0)
    heads = HEADS, KV_HEADS
    if step["decoding"]:
        pages = step["table"], step["block"]
        out = ops.paged_decode_attention(q, *caches, *pages, ends, lengths, step["longest"], *heads)
    else:
        out = ops.prefill_attention(
            q, k, v, *caches, lengths, lengths, step["longest"], *heads, actual_seq_lengths_cpu=ends
        )
    return x + ops.linear(out.flatten(1), w["out"], None, False)


def mla(x: Tensor, w: Weights, step: Step) -> Tensor:
    """Compute latent attention with absorbed projections. There is one KV head.

    A token's value is the first part of its key. The value cache is a view of the key cache, as in serving frameworks.
    """
    h, lengths, ends = ops.rms_norm(x, w["norm"], 1e-6), step["lengths"], step["ends"]
    q = ops.linear(h, w["latent_q"], None, False).view(-1, HEADS, SIZE + TURNED)
    latent, k_turned = ops.linear(h, w["latent_kv"], None, False).split((RANK, TURNED), dim=-1)
    latent = ops.rms_norm(latent.contiguous(), w["latent_norm"], 1e-6)
    q_turned, k_turned = ops.apply_rotary_pos_emb(
        q[..., SIZE:], k_turned[:, None], step["cos"], step["sin"], None, None
    )
    absorbed = torch.einsum("nhd,hdr->nhr", q[..., :SIZE], w["latent_k"])
    query, key = torch.cat([absorbed, q_turned], dim=-1), torch.cat([latent[:, None], k_turned], dim=-1)
    k_cache, value = step["latent_cache"], key[..., :RANK]
    v_cache = k_cache[..., :RANK]
    caches = ops.fill_kv_cache(key, value, k_cache, v_cache, step["slots"], [], [], quant_bits=0)
    shared: dict[str, Any] = {"softmax_scale": (SIZE + TURNED) ** -0.5, "head_size_v": RANK}
    if step["decoding"]:
        pages = step["table"], step["block"]
        out = ops.paged_decode_attention(
            query, *caches, *pages, ends, lengths, step["longest"], HEADS, 1, **shared
        )
    else:
        call = query, key, value, *caches, lengths, lengths, step["longest"], HEADS, 1
        out = ops.prefill_attention(*call, actual_seq_lengths_cpu=ends, **shared)
    values = torch.einsum("nhr,hrd->nhd", out, w["latent_v"])
    return x + ops.linear(values.flatten(1), w["out"], None, False)


def vit(x: Tensor, w: Weights, step: Step) -> Tensor:
    """Compute a layer of a vision tower: every patch attends to its whole image.

    The norms and the activation are functions of torch, not fused ops.
    """
    h = functional.layer_norm(x, (HIDDEN,), w["norm"], w["norm_bias"], 1e-6)
    qkv = ops.linear(h, w["vision_qkv"], w["vision_bias"], False).view(-1, 3 * HEADS, SIZE)
    q, k, v = qkv.split(HEADS, dim=1)
    call = q, k, v, None, None, step["new"], step["new"], step["longest"], HEADS, HEADS
    out = ops.prefill_attention(*call, causal=False, actual_seq_lengths_cpu=step["ends"])
    x = x + ops.linear(out.flatten(1), w["out"], w["norm_bias"], False)
    h = functional.layer_norm(x, (HIDDEN,), w["norm"], w["norm_bias"], 1e-6)
    return x + ops.linear(functional.gelu(ops.linear(h, w["vision_up"], None, False)), w["down"], None, False)


def moe(x: Tensor, w: Weights, step: Step) -> Tensor:
    h = ops.rms_norm(x, w["norm"], 1e-6)
    weights, ids = ops.moe_gating_topk_softmax(ops.linear(h, w["router"], None, False), TOP, MoeMetadata())
    return x + ops.fused_moe(h, w["experts_up"], w["experts_down"], weights, ids, TOP, True, MoeMetadata())


def model(tokens: Tensor, w: Weights, step: Step) -> Tensor:
    """Compute a decoder of two layers: tokens -> logits."""
    x = w["embedding"][tokens]
    x = mlp(attention(x, w, step), w, step)
    return ops.linear(ops.rms_norm(moe(x, w, step), w["norm"], 1e-6), w["embedding"], None, False)


BLOCKS = (
    Blocks("block_mlp", mlp),
    Blocks("block_attention", attention),
    Blocks("block_moe", moe, DTYPES[:1]),
    Blocks("block_mla", mla),
    Blocks("block_vit", vit),
    Blocks("block_model", model, DTYPES[:1], takes_tokens=True),
)


def weights(make: SampleMaker) -> Weights:
    """Return the weights of all blocks, scaled so that activations keep about the same size."""
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
        "out": (HIDDEN, HEADS * SIZE),
        "gate_up": (2 * WIDE, HIDDEN),
        "down": (HIDDEN, WIDE),
        "router": (EXPERTS, HIDDEN),
        "experts_up": (EXPERTS, 2 * WIDE, HIDDEN),
        "experts_down": (EXPERTS, HIDDEN, WIDE),
        "embedding": (VOCABULARY, HIDDEN),
        "latent_q": (HEADS * (SIZE + TURNED), HIDDEN),
        "latent_kv": (RANK + TURNED, HIDDEN),
        "latent_k": (HEADS, SIZE, RANK),
        "latent_v": (HEADS, RANK, SIZE),
        "vision_qkv": (3 * HEADS * SIZE, HIDDEN),
        "vision_up": (WIDE, HIDDEN),
    }
    matrices = {name: make.tensor(*shape, scale=shape[-1] ** -0.5) for name, shape in shapes.items()}
    ones = torch.ones(HIDDEN, dtype=make.dtype, device=make.device)
    sizes = {"bias": (HEADS + 2 * KV_HEADS) * SIZE, "vision_bias": 3 * HEADS * SIZE, "norm_bias": HIDDEN}
    biases = {name: make.tensor(size, scale=0.1) for name, size in sizes.items()}
    latent = torch.ones(RANK, dtype=make.dtype, device=make.device)
    return matrices | biases | {"norm": ones, "latent_norm": latent}


def steps(make: SampleMaker, takes_tokens: bool) -> Iterator[tuple[Tensor, Step]]:
    """Yield (input, step) for a prefill and two decoding steps. All steps use the same cache tensors."""
    block = make.layout.block_size or 8
    most = -(-(max(LENGTHS) + 2) // block)
    blocks = most * len(LENGTHS) + 1
    kinds = (KV_HEADS, SIZE), (KV_HEADS, SIZE), (1, RANK + TURNED)
    caches = [
        torch.zeros(make.layout.shape(blocks, block, *kind), dtype=make.dtype, device=make.device)
        for kind in kinds
    ]
    order = torch.randperm(blocks, generator=make.generator)[: most * len(LENGTHS)]
    table = order.view(len(LENGTHS), most)
    for new, history in ((LENGTHS, (0,) * len(LENGTHS)), *(((1,) * len(LENGTHS), _more(n)) for n in (0, 1))):
        positions = torch.cat([torch.arange(h, h + n) for n, h in zip(new, history, strict=True)])
        rows = torch.cat([torch.full((n,), row) for row, n in enumerate(new)])
        slots = table[rows, positions // block] * block + positions % block
        angles = positions[:, None] * 0.5 ** torch.arange(SIZE // 2)
        angles = torch.cat([angles, angles], dim=-1)
        lengths = torch.tensor([n + h for n, h in zip(new, history, strict=True)])
        step = {
            "decoding": history[0] > 0,
            "new": torch.tensor(new),
            "lengths": lengths,
            "ends": torch.tensor(new).cumsum(0),
            "longest": int(lengths.max()),
            "block": block,
            "table": table.to(make.device),
            "slots": slots.to(make.device),
            "cos": angles.cos().to(make.dtype).to(make.device),
            "sin": angles.sin().to(make.dtype).to(make.device),
            **dict(zip(CACHES, caches, strict=True)),
        }
        inputs = make.integers(0, VOCABULARY, len(rows)) if takes_tokens else make.tensor(len(rows), HIDDEN)
        yield inputs, step


def _more(steps_before: int) -> tuple[int, ...]:
    return tuple(length + steps_before for length in LENGTHS)
