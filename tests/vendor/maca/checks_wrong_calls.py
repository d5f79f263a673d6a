"""Faults put into the calls that kernels make, each of which has to be caught.

By torch or Python where the schema tells (``schema``), by the simulation where the sources do (``sources``), by
comparison with the reference where only numbers do (``numbers``). A simulation that lets a wrong name, order or dtype
pass would prove nothing.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer import ops, settings
from dlinfer.errors import DlinferError
from dlinfer.vendor.maca import latent, linears
from dlinfer.vendor.maca.kept import Kept
from tests.ops import cases
from tests.vendor.ascend.checks_wrong_calls import (
    Change,
    at,
    by_name,
    cast,
    exchange,
    gaps,
    put,
    rename,
    swap,
    without,
)
from tests.vendor.maca import checks_ops, checks_sizes, real_sizes, schemas, tolerances
from tests.vendor.maca.simulated_card import triton_package

DTYPE = torch.float16
Called = tuple[str, Callable[[], tuple]]


def sample(op: str, name: str) -> Called:
    return op, lambda: checks_ops.SAMPLES.arguments(ops.registry()[op], name, DTYPE)


def real(op: str, name: str) -> Called:
    call = next(one for one in real_sizes.calls() if (one.op, one.name) == (op, name))
    return op, lambda: call.arguments(checks_sizes.maker(DTYPE))


def attention(op: str, name: str) -> Called:
    return real(op, f"{name}, heads of 128, pages of 64")


def scattered() -> Called:
    def arguments() -> tuple:
        make = checks_sizes.maker(DTYPE)
        k, v = make.tensor(5, 2, 64), make.tensor(5, 2, 64)
        return k, v, make.cache(3, 16, 2, 64), make.cache(3, 16, 2, 64), make.permutation(48)[:5]

    return "fill_kv_cache", arguments


def eight_bits() -> Called:
    return real("linear_w8a8", "bias True")


def more(args: list[Any], kw: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [*args, 1], kw


def fewer(args: list[Any], kw: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return args[:-1], kw


def add(name: str, value: Any) -> Change:
    return lambda args, kw: (args, kw | {name: value})


NORM, ADD = sample("rms_norm", "many tokens"), sample("add_rms_norm", "many tokens")
QUANT = sample("dynamic_quant", "many tokens, int8")
SILU = sample("silu_and_mul", "many tokens")
ROPE = real("apply_rotary_pos_emb", "heads of 64")
FILL = scattered()
PROMPT = attention("prefill_attention", "grouped heads, mixed lengths")
WINDOW = attention("prefill_attention", "window")
SINKS = attention("prefill_attention", "sinks")
ALIBI = attention("prefill_attention", "alibi")
CAP = attention("prefill_attention", "soft-cap")
PAGED = attention("paged_prefill_attention", "grouped heads, mixed lengths and histories")
DECODING = attention("paged_decode_attention", "grouped heads, mixed lengths")
NARROW = attention("paged_decode_attention", "window")
LATENT = real("paged_decode_attention", "latent, mixed lengths")
LATENT_PROMPT = real("paged_prefill_attention", "latent, of a chunk")
LATENT_FILL = real("fill_kv_cache", "latent, 512 and 64")
GATING = sample("moe_gating_topk_softmax", "many tokens")
EXPERTS = real("fused_moe", "2 of 6")
FOUR = real("weight_quant_matmul", "256 by 128, zeros True")
EIGHT = eight_bits()

RMS, FUSED, ACT, INT8 = (
    "_C::rms_norm",
    "_C::fused_add_rms_norm",
    "_C::silu_and_mul",
    "_C::dynamic_scaled_int8_quant",
)
TURN, CACHE = "mcoplib.lmdeploy::lmdeploy_rotary_embedding", "_C_cache_ops::reshape_and_cache_flash"
VARLEN, KVCACHE = "flash_attn::flash_attn_varlen_func", "flash_attn::flash_attn_with_kvcache"
SCHEDULE, MLA = "flash_mla::get_mla_metadata", "flash_mla::flash_mla_with_kvcache"
CONCAT = "_C_cache_ops::concat_and_cache_mla"
TOPK, ALIGN, SUM = "_moe_C::topk_softmax", "_moe_C::moe_align_block_size", "_moe_C::moe_sum"
GEMM8, GEMM4, REPACK = "_C::cutlass_scaled_mm", "_C::awq_gemm", "_C::awq_to_gptq_4bit"


@dataclass(frozen=True)
class Fault:
    """One fault: in which op's call of which of the vendor's functions, and what has to catch it."""

    called: Called
    vendors: str
    what: str
    change: Change
    by: str


FAULTS = [
    Fault(NORM, RMS, "out for result", by_name(0, "out"), "schema"),
    Fault(NORM, RMS, "eps for epsilon", by_name(3, "eps"), "schema"),
    Fault(NORM, RMS, "the result last", swap(0, 1), "numbers"),
    Fault(NORM, RMS, "weight first", swap(1, 2), "sources"),
    Fault(NORM, RMS, "weight in float32", cast(2, torch.float32), "sources"),
    Fault(NORM, RMS, "weight of another size", at(2, lambda x: x[:-1]), "sources"),
    Fault(NORM, RMS, "weight with gaps", gaps(2), "sources"),
    Fault(NORM, RMS, "a result in float32", cast(0, torch.float32), "sources"),
    Fault(NORM, RMS, "one row less", at(0, lambda x: x[:-1]), "sources"),
    Fault(ADD, FUSED, "weight second", swap(1, 2), "sources"),
    Fault(ADD, FUSED, "the residual first", swap(0, 1), "numbers"),
    Fault(ADD, FUSED, "the residual in bfloat16", cast(1, torch.bfloat16), "sources"),
    Fault(ADD, FUSED, "the residual with gaps", gaps(1), "sources"),
    Fault(ADD, FUSED, "a copy of the input", at(0, lambda x: x.clone()), "numbers"),
    Fault(ADD, FUSED, "one argument more", more, "schema"),
    Fault(QUANT, INT8, "no azp", fewer, "schema"),
    Fault(QUANT, INT8, "scales in float16", cast(2, torch.float16), "sources"),
    Fault(QUANT, INT8, "numbers in uint8", cast(0, torch.uint8), "sources"),
    Fault(QUANT, INT8, "the input first", swap(0, 1), "sources"),
    Fault(QUANT, INT8, "one scale less", at(2, lambda x: x[:-1]), "sources"),
    Fault(
        QUANT,
        INT8,
        "between vectors",
        at(1, lambda x: torch.cat((x.view(-1)[:1], x.view(-1)))[1:].view(x.shape)),
        "sources",
    ),
    Fault(SILU, ACT, "the input first", swap(0, 1), "sources"),
    Fault(SILU, ACT, "a result as wide", at(0, lambda x: torch.cat((x, x), -1)), "sources"),
    Fault(SILU, ACT, "input with gaps", gaps(1), "sources"),
    Fault(SILU, ACT, "up before gate", at(1, lambda x: x.roll(x.shape[-1] // 2, -1)), "numbers"),
    Fault(ROPE, TURN, "is_neox by name", by_name(6, "is_neox"), "schema"),
    Fault(ROPE, TURN, "positions in int32", cast(0, torch.int32), "sources"),
    Fault(ROPE, TURN, "cos in float32", cast(4, torch.float32), "sources"),
    Fault(ROPE, TURN, "cos and sin exchanged", swap(4, 5), "numbers"),
    Fault(ROPE, TURN, "a copy of the query", at(1, lambda x: x.clone()), "numbers"),
    Fault(ROPE, TURN, "half a table", at(4, lambda x: x[:, :32].contiguous()), "sources"),
    Fault(ROPE, TURN, "head_size behind cos", swap(3, 4), "schema"),
    Fault(ROPE, TURN, "GPT-J's pairs", at(6, lambda x: False), "sources"),
    Fault(ROPE, TURN, "positions from one", at(0, lambda x: x + 1), "sources"),
    Fault(ROPE, TURN, "half a head", at(3, lambda x: x // 2), "sources"),
    Fault(FILL, CACHE, "slots in int32", cast(4, torch.int32), "sources"),
    Fault(FILL, CACHE, "caches first", lambda args, kw: ([*args[2:4], *args[:2], *args[4:]], kw), "sources"),
    Fault(FILL, CACHE, "values first", swap(0, 1), "numbers"),
    Fault(FILL, CACHE, "the caches exchanged", swap(2, 3), "numbers"),
    Fault(FILL, CACHE, "caches of fp8", at(5, lambda x: "fp8"), "sources"),
    Fault(FILL, CACHE, "scales as numbers", at(6, lambda x: 1.0), "schema"),
    Fault(FILL, CACHE, "values in bfloat16", cast(1, torch.bfloat16), "sources"),
    Fault(
        FILL,
        CACHE,
        "values by heads",
        at(1, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
        "sources",
    ),
    Fault(FILL, CACHE, "a slot behind the end", at(4, lambda x: x + 48), "sources"),
    Fault(PROMPT, VARLEN, "max_seq_len_q", rename("max_seqlen_q", "max_seq_len_q"), "schema"),
    Fault(PROMPT, VARLEN, "sm_scale", rename("softmax_scale", "sm_scale"), "schema"),
    Fault(PROMPT, VARLEN, "no max_seqlen_k", without("max_seqlen_k"), "schema"),
    Fault(PROMPT, VARLEN, "ends in int64", cast("cu_seqlens_q", torch.int64), "sources"),
    Fault(PROMPT, VARLEN, "ends without 0", at("cu_seqlens_k", lambda x: x[1:].contiguous()), "sources"),
    Fault(PROMPT, VARLEN, "max_seqlen_k of one", put("max_seqlen_k", 1), "sources"),
    Fault(PROMPT, VARLEN, "k and v exchanged", exchange("k", "v"), "numbers"),
    Fault(PROMPT, VARLEN, "v in bfloat16", cast("v", torch.bfloat16), "sources"),
    Fault(PROMPT, VARLEN, "not causal", put("causal", False), "numbers"),
    Fault(PROMPT, VARLEN, "the usual scale's square", at("softmax_scale", lambda x: x * x), "numbers"),
    Fault(PROMPT, VARLEN, "q with gaps in heads", gaps("q"), "sources"),
    Fault(WINDOW, VARLEN, "a window of one more", at("window_size", lambda x: (x[0] + 1, x[1])), "numbers"),
    Fault(SINKS, VARLEN, "sinks for s_aux", rename("s_aux", "sinks"), "schema"),
    Fault(SINKS, VARLEN, "sinks in float32", cast("s_aux", torch.float32), "sources"),
    Fault(SINKS, VARLEN, "no sinks", without("s_aux"), "numbers"),
    Fault(ALIBI, VARLEN, "slopes in float16", cast("alibi_slopes", torch.float16), "sources"),
    Fault(ALIBI, VARLEN, "slopes of other signs", at("alibi_slopes", lambda x: -x), "numbers"),
    Fault(CAP, VARLEN, "no soft-cap", put("softcap", 0.0), "numbers"),
    Fault(PAGED, VARLEN, "block_tables", rename("block_table", "block_tables"), "schema"),
    Fault(PAGED, VARLEN, "a table in int64", cast("block_table", torch.int64), "sources"),
    Fault(PAGED, VARLEN, "no table", without("block_table"), "sources"),
    Fault(PAGED, VARLEN, "lengths for ends", at("cu_seqlens_k", lambda x: x.diff(prepend=x[:1])), "sources"),
    Fault(DECODING, KVCACHE, "cache_seq_lens", rename("cache_seqlens", "cache_seq_lens"), "schema"),
    Fault(DECODING, KVCACHE, "lengths in int64", cast("cache_seqlens", torch.int64), "sources"),
    Fault(DECODING, KVCACHE, "lengths before this token", at("cache_seqlens", lambda x: x - 1), "numbers"),
    Fault(DECODING, KVCACHE, "q without its token", at("q", lambda x: x.squeeze(1)), "sources"),
    Fault(DECODING, KVCACHE, "the caches exchanged", exchange("k_cache", "v_cache"), "numbers"),
    Fault(DECODING, KVCACHE, "one row of the table less", at("block_table", lambda x: x[:-1]), "sources"),
    Fault(DECODING, KVCACHE, "causal as an int", put("causal", 1), "sources"),
    Fault(NARROW, KVCACHE, "a window of one less", at("window_size", lambda x: (x[0] - 1, x[1])), "numbers"),
    Fault(LATENT, SCHEDULE, "lengths in int64", cast(0, torch.int64), "sources"),
    Fault(LATENT, SCHEDULE, "no heads of keys", fewer, "schema"),
    Fault(LATENT, SCHEDULE, "the later is_fp8_kvcache", add("is_fp8_kvcache", False), "schema"),
    Fault(LATENT, SCHEDULE, "a number for a whole one", at(1, float), "schema"),
    Fault(LATENT, MLA, "cache_seq_lens", rename("cache_seqlens", "cache_seq_lens"), "schema"),
    Fault(LATENT, MLA, "head_size_v", rename("head_dim_v", "head_size_v"), "schema"),
    Fault(LATENT, MLA, "no num_splits", without("num_splits"), "schema"),
    Fault(LATENT, MLA, "the later is_fp8_kvcache", add("is_fp8_kvcache", False), "schema"),
    Fault(LATENT, MLA, "causal as an int", put("causal", 1), "schema"),
    Fault(LATENT, MLA, "lengths in int64", cast("cache_seqlens", torch.int64), "sources"),
    Fault(LATENT, MLA, "a table in int64", cast("block_table", torch.int64), "sources"),
    Fault(LATENT, MLA, "one row of the table less", at("block_table", lambda x: x[:-1]), "sources"),
    Fault(LATENT, MLA, "values as wide as keys", put("head_dim_v", 576), "sources"),
    Fault(LATENT, MLA, "q without its token", at("q", lambda x: x.squeeze(1)), "sources"),
    Fault(LATENT, MLA, "q in bfloat16", cast("q", torch.bfloat16), "sources"),
    Fault(LATENT, MLA, "q with gaps in heads", gaps("q"), "sources"),
    Fault(LATENT, MLA, "keys without their end", at("k_cache", lambda x: x[..., :512]), "sources"),
    Fault(
        LATENT,
        MLA,
        "the schedule's parts exchanged",
        exchange("tile_scheduler_metadata", "num_splits"),
        "sources",
    ),
    Fault(LATENT, MLA, "the usual scale", without("softmax_scale"), "numbers"),
    Fault(LATENT, MLA, "lengths before this token", at("cache_seqlens", lambda x: x - 1), "numbers"),
    Fault(LATENT, MLA, "tokens for sequences", at("q", lambda x: x.transpose(0, 1)), "sources"),
    Fault(LATENT_PROMPT, MLA, "not causal", put("causal", False), "numbers"),
    Fault(LATENT_FILL, CONCAT, "slots in int32", cast(3, torch.int32), "sources"),
    Fault(LATENT_FILL, CONCAT, "the end first", swap(0, 1), "numbers"),
    Fault(LATENT_FILL, CONCAT, "the end in bfloat16", cast(1, torch.bfloat16), "sources"),
    Fault(LATENT_FILL, CONCAT, "all of the key", at(1, lambda x: torch.cat((x, x), -1)), "sources"),
    Fault(LATENT_FILL, CONCAT, "a cache with heads", at(2, lambda x: x.unsqueeze(2)), "sources"),
    Fault(LATENT_FILL, CONCAT, "a copy of the cache", at(2, lambda x: x.clone()), "numbers"),
    Fault(LATENT_FILL, CONCAT, "a slot behind the end", at(3, lambda x: x + 192), "sources"),
    Fault(LATENT_FILL, CONCAT, "caches of fp8", at(4, lambda x: "fp8"), "sources"),
    Fault(LATENT_FILL, CONCAT, "no scale", fewer, "schema"),
    Fault(GATING, TOPK, "ids first", swap(0, 1), "sources"),
    Fault(GATING, TOPK, "weights in float16", cast(0, torch.float16), "sources"),
    Fault(GATING, TOPK, "rows in int64", cast(2, torch.int64), "sources"),
    Fault(GATING, TOPK, "renormalised", at(4, lambda x: True), "numbers"),
    Fault(GATING, TOPK, "logits with gaps", gaps(3), "sources"),
    Fault(EXPERTS, ALIGN, "the block before the experts", swap(1, 2), "sources"),
    Fault(EXPERTS, ALIGN, "no map", fewer, "schema"),
    Fault(EXPERTS, ALIGN, "order in int64", cast(3, torch.int64), "sources"),
    Fault(EXPERTS, ALIGN, "no room for padding", at(3, lambda x: x[:140]), "sources"),
    Fault(EXPERTS, ALIGN, "blocks of half the size", at(2, lambda x: x // 2), "sources or numbers"),
    Fault(EXPERTS, SUM, "the sum first", swap(0, 1), "sources"),
    Fault(EXPERTS, SUM, "choices first", at(0, lambda x: x.transpose(0, 1).contiguous()), "sources"),
    Fault(EIGHT, GEMM8, "b in rows", at(2, lambda x: x.contiguous()), "sources"),
    Fault(EIGHT, GEMM8, "b not transposed", at(2, lambda x: x.t()), "sources"),
    Fault(EIGHT, GEMM8, "scales exchanged", swap(3, 4), "sources"),
    Fault(EIGHT, GEMM8, "scales in float16", cast(3, torch.float16), "sources"),
    Fault(EIGHT, GEMM8, "a in int32", cast(1, torch.int32), "sources"),
    Fault(EIGHT, GEMM8, "bias in float32", cast(5, torch.float32), "sources"),
    Fault(EIGHT, GEMM8, "no bias", at(5, lambda x: None), "numbers"),
    Fault(FOUR, GEMM4, "zeros before scales", swap(2, 3), "sources"),
    Fault(FOUR, GEMM4, "scales in float32", cast(2, torch.float32), "sources"),
    Fault(FOUR, GEMM4, "bfloat16 for float16", at(6, lambda x: True), "sources"),
    Fault(FOUR, GEMM4, "symmetric zeros", at(3, lambda x: torch.full_like(x, 0x77777777)), "numbers"),
    Fault(FOUR, GEMM4, "split_k for split_k_iters", by_name(4, "split_k"), "schema"),
    Fault(FOUR, REPACK, "words in int64", cast(0, torch.int64), "sources"),
    Fault(FOUR, REPACK, "neighbours swapped", at(0, lambda x: (x << 16) | ((x >> 16) & 0xFFFF)), "numbers"),
]


def result(called: Called) -> tuple[list[Tensor], list[Tensor], Any]:
    op, args = ops.registry()[called[0]], called[1]()
    host = tuple(one.cpu() if isinstance(one, Tensor) else one for one in args)
    want = cases.expected(op, host)
    with settings.override(fallback="error"):
        returned = op.overload(*args)
    return [one.cpu() for one in cases.results(op, args, returned)], want, tolerances.of(op, DTYPE)


def where(vendors: str) -> tuple[dict[str, Any], str]:
    """What holds one of the vendor's functions, and its name there."""
    space, _, name = vendors.partition("::")
    holder = getattr(torch.ops, space) if space.startswith("_") else importlib.import_module(space)
    return holder.__dict__, name


def test_there_are_enough():
    assert len(FAULTS) >= 100
    assert len({(fault.vendors, fault.what, fault.called[0]) for fault in FAULTS}) == len(FAULTS)
    assert {fault.vendors for fault in FAULTS} == schemas.called()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.vendors}-{fault.called[0]}-{fault.what}")
def test_a_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch):
    if fault.called[0] == "fused_moe" and (reason := triton_package.missing()):
        pytest.skip(reason)
    holder, name = where(fault.vendors)
    plain, spoilt = getattr(torch.ops, fault.vendors.partition("::")[0], None), []
    genuine = getattr(plain, name) if fault.vendors.startswith("_") else holder[name]

    def planted(*args: Any, **kwargs: Any) -> Any:
        spoilt.append(fault.what)
        given, named = fault.change(list(args), dict(kwargs))
        return genuine(*given, **named)

    monkeypatch.setattr(linears, "_prepared", Kept(linears._prepare))
    cases.assert_close(*result(fault.called))
    monkeypatch.setitem(holder, name, planted)
    monkeypatch.setattr(linears, "_prepared", Kept(linears._prepare))  # none that a good call has made
    latent._scheduled.cache_clear()
    caught = ""
    try:
        found = result(fault.called)
    except DlinferError as error:
        caught = f"sources: {error}"
    except TypeError as error:
        caught = f"schema: {error}"
    except RuntimeError as error:
        is_source = "NotAdmittedError" in (type(error).__name__ + str(error))
        caught = f"{'sources' if is_source else 'schema'}: {error}"
    else:
        try:
            cases.assert_close(*found)
        except AssertionError as error:
            caught = f"numbers: {error}"
    assert spoilt
    assert caught.partition(":")[0] in fault.by.split(" or "), caught or "nothing caught it"
