"""Calls of ops in sizes that real models have and the vendor's sources admit, of the interface's own table of cases."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dlinfer.ops.attention import samples as attention_samples
from dlinfer.ops.attention.samples import Case
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised.packing import AWQ
from tests.vendor.ascend.real_sizes import (
    Call,
    decode,
    latent,
    latent_paged_prompt,
    latent_prompt,
    paged_prefill,
    prefill,
)

LATENT = {"sizes": (576, 576), "block_size": 64}
"""Of DeepSeek's cache, whose values are the first 512 numbers of its keys."""
LATENT_DECODE = (
    Case("mixed lengths", (1,) * 5, (130, 1, 256, 64, 65), heads=(16, 1), **LATENT),
    Case("128 heads, a padding row", (1,) * 3, (70, 0, 3), heads=(128, 1), index_dtype=torch.int32, **LATENT),
    Case("2 heads", (1,), (200,), heads=(2, 1), **LATENT),
)
LATENT_PROMPTS = (
    Case("of one piece and of two", (130, 1, 33), heads=(4, 1), **LATENT),
    Case("one empty", (15, 0, 40), heads=(16, 1), **LATENT),
    Case("alike", (9,) * 3, heads=(2, 1), unused_rows=2, **LATENT),
    Case("more queries than keys", (140, 3), (4, 0), heads=(2, 1), **LATENT),
    Case("without keys", (2,), (0,), heads=(2, 1), **LATENT),
)
LATENT_PAGED_PROMPTS = (
    Case("of a chunk", (17, 1, 20), (130, 129, 20), heads=(16, 1), **LATENT),
    Case("of pieces and a rest", (260, 5), (261, 133), heads=(2, 1), index_dtype=torch.int32, **LATENT),
)


def served(table: tuple[Case, ...], block_size: int, size: int) -> Iterator[Case]:
    """Cases in real sizes, over as many pages as before; MetaX has no alibi with sinks."""
    for case in table:
        if not (case.alibi and case.sinks):
            lens = case.kv_lens and tuple(count * block_size // case.block_size for count in case.kv_lens)
            yield replace(case, kv_lens=lens, block_size=block_size, sizes=(size, size))


def rotation(make: SampleMaker, size: int) -> tuple:
    """Tables as models have them: both halves alike."""
    angles = make.tensor(5, size // 2, scale=3.0)
    tables = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    packed = make.tensor(5, 8, size)
    return packed[:, :4], packed[:, 4:6], *tables


def four_bits(make: SampleMaker, inner: int, group: int, zeros: bool) -> tuple:
    """x, words, scales, zero points or None, bias and the size of a group."""
    groups = AWQ.of_groups(group).groups(inner)
    words = make.integers(-(2**31), 2**31, inner, 6).int()
    offset = make.integers(-(2**31), 2**31, groups, 6).int() if zeros else None
    scales = ((make.tensor(groups, 48).abs() + 0.5) * 0.01).half()
    return make.tensor(3, inner), words, scales, offset, make.tensor(48).half(), group


def eight_bits(make: SampleMaker, bias: bool) -> tuple:
    """Of linear_w8a8, with sizes that are multiples of 16."""
    a, b = make.integers(-127, 128, 1, 5, 64).to(torch.int8), make.integers(-127, 128, 48, 64).to(torch.int8)
    scales = (make.tensor(*shape).abs().float() * 0.01 + 0.001 for shape in ((1, 5, 1), (48, 1)))
    return a, b, *scales, make.dtype, torch.int8, make.tensor(48) if bias else None


def experts(make: SampleMaker, chosen: int) -> tuple:
    """More columns than a tile of the product, and 70 tokens so that experts have several blocks."""
    weights = make.tensor(70, 6).float().softmax(-1).topk(chosen, -1)
    gate_up, down = make.tensor(6, 160, 72, scale=0.1), make.tensor(6, 72, 80, scale=0.1)
    return make.tensor(70, 72), gate_up, down, *weights, chosen, True


def copied_values(make: SampleMaker, case: Case) -> tuple:
    """A prompt as LMDeploy has it: its values are equal to what its keys begin with, and lie elsewhere."""
    q, keys, values, *rest = latent_prompt(make, case)
    return q, keys, values.clone(), *rest


def unmasked(make: SampleMaker, case: Case) -> tuple:
    """A latent prompt over pages that is not causal."""
    args = list(latent_paged_prompt(make, case))
    args[-6] = False
    return tuple(args)


def filled(make: SampleMaker, size: int, end: int) -> tuple:
    """Keys, of which values are the beginning but lie elsewhere, as LMDeploy has them, and a cache that both share."""
    k, cache = make.tensor(5, 1, size + end), make.cache(3, 64, 1, size + end)
    slots = make.permutation(192)[:5]
    slots[2] = -1
    return k, k[..., :size].clone(), cache, cache[..., :size], slots


def latent_calls() -> Iterator[Call]:
    """Those over a latent cache."""
    for op, made, table, what in (
        ("paged_decode_attention", latent, LATENT_DECODE, ""),
        ("prefill_attention", latent_prompt, LATENT_PROMPTS, ""),
        ("prefill_attention", copied_values, LATENT_PROMPTS[:1], ", values elsewhere"),
        ("paged_prefill_attention", latent_paged_prompt, LATENT_PAGED_PROMPTS, ""),
        ("paged_prefill_attention", unmasked, LATENT_PAGED_PROMPTS, ", not causal"),
    ):
        for case in table:
            name = f"latent, {case.name}{what}"
            yield Call(op, name, lambda make, made=made, case=case: made(make, case))
    for size, end in ((512, 64), (16, 8)):
        name = f"latent, {size} and {end}"
        yield Call("fill_kv_cache", name, lambda make, given=(size, end): filled(make, *given))


def calls() -> Iterator[Call]:
    """All of them."""
    for op, made, table in (
        ("prefill_attention", prefill, attention_samples.PREFILL),
        ("paged_prefill_attention", paged_prefill, attention_samples.PAGED_PREFILL),
        ("paged_decode_attention", decode, attention_samples.DECODE),
    ):
        for block_size, size in ((64, 128), (16, 80)):
            for case in served(table, block_size, size):
                name = f"{case.name}, heads of {size}, pages of {block_size}"
                yield Call(op, name, lambda make, made=made, case=case: made(make, case))
    for size in (64, 128, 80):
        yield Call("apply_rotary_pos_emb", f"heads of {size}", lambda make, size=size: rotation(make, size))
    for inner, group in ((256, 128), (256, 0), (64, 64), (128, 32), (64, 0)):
        for zeros in (True, False):
            name = f"{inner} by {group}, zeros {zeros}"
            yield Call(
                "weight_quant_matmul", name, lambda make, given=(inner, group, zeros): four_bits(make, *given)
            )
    for bias in (True, False):
        yield Call("linear_w8a8", f"bias {bias}", lambda make, bias=bias: eight_bits(make, bias))
    for chosen in (1, 2, 3, 6):
        yield Call("fused_moe", f"{chosen} of 6", lambda make, chosen=chosen: experts(make, chosen))
    yield from latent_calls()
