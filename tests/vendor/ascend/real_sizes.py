"""Calls of the attention ops in sizes that the vendor's documents admit, of the interface's own table of cases."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dlinfer.ops.attention import samples as attention_samples
from dlinfer.ops.attention.samples import Case, lengths, new_tokens, pages, per_head, queries
from dlinfer.ops.core.samples import SampleMaker

NOT_SERVED = ("softcap", "alibi", "sinks")


def prefill(make: SampleMaker, case: Case) -> tuple:
    q, out = queries(make, case)
    k, v = new_tokens(make, case)
    extras = case.softmax_scale, case.causal, *case.window, case.softcap, *per_head(make, case)
    return q, k, v, *lengths(case), max(case.q_lens), *case.heads, out, *extras


def paged_prefill(make: SampleMaker, case: Case) -> tuple:
    q, out = queries(make, case)
    cached = *pages(make, case), case.block_size
    extras = case.softmax_scale, case.causal, *case.window, case.softcap, *per_head(make, case)
    spans = *lengths(case), max(case.q_lens), max(case.keys)
    return q, *cached, *spans, *case.heads, out, *extras


def decode(make: SampleMaker, case: Case) -> tuple:
    q, out = queries(make, case)
    cached = *pages(make, case), case.block_size
    extras = case.softmax_scale, case.window[0], case.softcap, *per_head(make, case)
    return q, *cached, lengths(case)[1], max(case.keys), *case.heads, out, *extras


def latent(make: SampleMaker, case: Case) -> tuple:
    """Of DeepSeek's cache, whose values are the first part of its keys."""
    q, out = queries(make, replace(case, sizes=(576, 512)))
    keys, _, table = pages(make, case)
    spans = lengths(case)[1], max(case.keys)
    return (
        q,
        keys,
        keys[..., :512],
        table,
        case.block_size,
        *spans,
        *case.heads,
        out,
        0.05,
        -1,
        0.0,
        None,
        None,
    )


def latent_prompt(make: SampleMaker, case: Case) -> tuple:
    """Absorbed prompts of DeepSeek's, before they are in the cache."""
    q, out = queries(make, replace(case, sizes=(576, 512)))
    keys, _ = new_tokens(make, case)
    extras = 0.05, True, -1, -1, 0.0, None, None
    return q, keys, keys[..., :512], *lengths(case), max(case.q_lens), *case.heads, out, *extras


def latent_paged_prompt(make: SampleMaker, case: Case) -> tuple:
    """The same over the cache."""
    q, out = queries(make, replace(case, sizes=(576, 512)))
    keys, _, table = pages(make, case)
    spans = *lengths(case), max(case.q_lens), max(case.keys)
    extras = 0.05, True, -1, -1, 0.0, None, None
    return q, keys, keys[..., :512], table, case.block_size, *spans, *case.heads, out, *extras


def served(table: tuple[Case, ...], block_size: int, size: int) -> Iterator[Case]:
    """Cases of the interface without what the vendor has not, in real sizes, over as many pages as before."""
    for case in table:
        if not any(getattr(case, one) for one in NOT_SERVED):
            lens = case.kv_lens and tuple(count * block_size // case.block_size for count in case.kv_lens)
            yield replace(case, kv_lens=lens, block_size=block_size, sizes=(size, size))


LATENT_PROMPTS = (
    Case("of 16 and 1", (16, 1, 33), (16, 1, 33), heads=(4, 1), sizes=(576, 576), block_size=128),
    Case("one empty", (15, 0, 40), (15, 0, 40), heads=(16, 1), sizes=(576, 576), block_size=128),
    Case("over a block", (130,), (130,), heads=(2, 1), sizes=(576, 576), block_size=128),
)
LATENT_PAGED_PROMPTS = (
    Case("of a chunk", (17, 1, 20), (130, 129, 20), heads=(4, 1), sizes=(576, 576), block_size=128),
    Case("pages of 16", (16, 5), (48, 21), heads=(128, 1), sizes=(576, 576), block_size=16),
)
LATENT = Case("latent", (1, 1, 1), (130, 1, 256), heads=(16, 1), sizes=(576, 576), block_size=128)


@dataclass(frozen=True)
class Call:
    """A call of one op. arguments: makes them."""

    op: str
    name: str
    arguments: Callable[[SampleMaker], tuple]


def calls() -> Iterator[Call]:
    """All of them."""
    for op, made, table, sizes in (
        ("prefill_attention", prefill, attention_samples.PREFILL, ((8, 128), (8, 64))),
        ("paged_prefill_attention", paged_prefill, attention_samples.PAGED_PREFILL, ((128, 128), (256, 64))),
        ("paged_decode_attention", decode, attention_samples.DECODE, ((128, 128), (16, 64))),
    ):
        for block_size, size in sizes:
            for case in served(table, block_size, size):
                name = f"{case.name}, heads of {size}, pages of {block_size}"
                yield Call(op, name, lambda make, made=made, case=case: made(make, case))
    yield Call("paged_decode_attention", "latent", lambda make: latent(make, LATENT))
    for case in LATENT_PROMPTS:
        yield Call(
            "prefill_attention", f"latent, {case.name}", lambda make, case=case: latent_prompt(make, case)
        )
    for case in LATENT_PAGED_PROMPTS:
        name = f"latent, {case.name}"
        yield Call("paged_prefill_attention", name, lambda make, case=case: latent_paged_prompt(make, case))
