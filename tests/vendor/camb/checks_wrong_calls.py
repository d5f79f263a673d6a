"""Faults put into the calls that kernels make, each of which has to be caught.

By Python where the signature tells (``signature``), by the simulation where the documents do (``documents``), by
comparison with the reference where only numbers do (``numbers``). A simulation that lets a wrong name, order or dtype
pass would prove nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer import ops, settings
from dlinfer.errors import DlinferError
from dlinfer.vendor.camb import sdk
from tests.ops import cases
from tests.vendor.ascend.checks_wrong_calls import (
    Change,
    at,
    by_name,
    cast,
    gaps,
    put,
    rename,
    swap,
    without,
)
from tests.vendor.camb import checks_ops, checks_sizes, comparing, real_sizes, signatures

DTYPE = torch.float16


def sample(op: str, name: str) -> tuple[str, Callable[[], tuple]]:
    return op, lambda: checks_ops.SAMPLES.arguments(ops.registry()[op], name, DTYPE)


def real(op: str, name: str) -> tuple[str, Callable[[], tuple]]:
    call = next(one for one in real_sizes.calls() if (one.op, one.name) == (op, name))
    return op, lambda: call.arguments(checks_sizes.maker(DTYPE))


def without_last(args: list[Any], kw: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return args[:-1], kw


def one_more(args: list[Any], kw: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [*args, None], kw


def half_cut(place: int) -> Change:
    return at(place, lambda x: x[..., : x.shape[-1] // 2].contiguous())


NORM, ADD = sample("rms_norm", "many tokens"), sample("add_rms_norm", "many tokens")
NORM8 = sample("rms_norm_w8a8", "many tokens, int8")
ADD8 = sample("add_rms_norm_w8a8", "many tokens, int8")
QUANT = sample("dynamic_quant", "many tokens, int8")
ROPE = real("apply_rotary_pos_emb", "a packed projection")
PAIRS = sample("apply_rotary_pos_emb_interleaved", "LMDeploy's query and key, pairs")
SILU = sample("silu_and_mul", "many tokens")
LINEAR = real("linear", "a projection with a bias")
STORED = sample("linear", "weight stored as [in, out]")
EIGHT = sample("linear_w8a8", "one token, bias, int8")
FILL = sample("fill_kv_cache", "scattered")
PREFILL = real("prefill_attention", "grouped heads, mixed lengths, heads of 64")
WINDOW = real("prefill_attention", "window, heads of 64")
PAGED = real("paged_prefill_attention", "grouped heads, mixed lengths and histories, heads of 64")
DECODE = real("paged_decode_attention", "grouped heads, mixed lengths, heads of 64")
LATENTS, LATENT = real("fill_kv_cache", "latent"), real("paged_decode_attention", "latent")
LATENT_CHUNK = real("paged_prefill_attention", "latent")
NARROW = real("paged_decode_attention", "window, heads of 64")
GATING = sample("moe_gating_topk_softmax", "many tokens")
EXPERTS = real("fused_moe", "60 experts")
EXPERTS8 = sample("fused_moe_w8a8", "odd sizes, int8")
RMS, FLASH, SINGLE = "fused_rms_norm", "flash_attention", "single_query_cached_kv_attn"
GROUPS8, BACK = "smooth_quant_group_gemm", "moe_combine_result"


@dataclass(frozen=True)
class Fault:
    """One fault: in which op's call of which of the vendor's functions, and what has to catch it."""

    called: tuple[str, Callable[[], tuple]]
    vendors: str
    what: str
    change: Change
    by: str


FAULTS = [
    Fault(NORM, RMS, "one argument less", without_last, "signature"),
    Fault(NORM, RMS, "epsilon for eps", by_name(5, "epsilon"), "signature"),
    Fault(NORM, RMS, "gamma for x", swap(0, 2), "documents"),
    Fault(NORM, RMS, "gamma as the residual", swap(1, 2), "documents"),
    Fault(NORM, RMS, "gamma in float32", cast(2, torch.float32), "documents"),
    Fault(NORM, RMS, "gamma of another size", half_cut(2), "documents"),
    Fault(NORM, RMS, "rows of three dimensions", at(0, lambda x: x.unsqueeze(0)), "documents"),
    Fault(NORM, RMS, "rows with gaps", gaps(0), "documents"),
    Fault(NORM, RMS, "the flag before eps", swap(5, 6), "signature"),
    Fault(ADD, RMS, "the residual in bfloat16", cast(1, torch.bfloat16), "documents"),
    Fault(ADD, RMS, "no residual", at(1, lambda x: None), "numbers"),
    Fault(ADD, RMS, "no sum", at(6, lambda x: False), "numbers or signature"),
    Fault(NORM8, RMS, "dynamic for dynamic_quant", rename("dynamic_quant", "dynamic"), "signature"),
    Fault(NORM8, RMS, "factors in float16", cast(7, DTYPE), "documents"),
    Fault(NORM8, RMS, "quantised by fixed factors", without("dynamic_quant"), "documents"),
    Fault(ADD8, RMS, "factors for gamma", swap(2, 7), "documents"),
    Fault(QUANT, "scaled_quantize", "numbers of 8 bits", cast(0, torch.int8), "documents"),
    Fault(QUANT, "scaled_quantize", "another mode", put("quant_mode", "dynamic_per_tensor"), "documents"),
    Fault(ROPE, "apply_rotary", "cos before sin", swap(1, 2), "numbers"),
    Fault(ROPE, "apply_rotary", "pairs for halves", at(5, lambda x: True), "numbers"),
    Fault(ROPE, "apply_rotary", "tables in float32", cast(1, torch.float32), "documents"),
    Fault(ROPE, "apply_rotary", "packed heads", at(0, lambda x: x[0]), "documents"),
    Fault(ROPE, "apply_rotary", "discrete without positions", at(6, lambda x: True), "documents"),
    Fault(ROPE, "apply_rotary", "a table for each sequence", at(7, lambda x: True), "documents"),
    Fault(ROPE, "apply_rotary", "another length", at(8, lambda x: x - 1), "documents"),
    Fault(ROPE, "apply_rotary", "no output", without("output"), "numbers"),
    Fault(ROPE, "apply_rotary", "out for output", rename("output", "out"), "signature"),
    Fault(ROPE, "apply_rotary", "an output with gaps", gaps("output"), "documents"),
    Fault(
        ROPE,
        "apply_rotary",
        "tables of half the head",
        lambda a, k: half_cut(1)(*half_cut(2)(a, k)),
        "numbers",
    ),
    Fault(PAIRS, "apply_rotary", "halves for pairs", at(5, lambda x: False), "numbers"),
    Fault(SILU, "active", "swiglu", at(1, lambda x: "swiglu"), "documents"),
    Fault(SILU, "active", "a number for the flag", at(2, lambda x: 1), "signature"),
    Fault(SILU, "active", "input with gaps", gaps(0), "documents"),
    Fault(SILU, "active", "gate and up exchanged", at(0, lambda x: x.roll(x.shape[-1] // 2, -1)), "numbers"),
    Fault(LINEAR, "matmul", "the weight first", swap(0, 1), "documents or numbers"),
    Fault(LINEAR, "matmul", "a bias [1, out]", at(2, lambda x: x[None]), "documents"),
    Fault(LINEAR, "matmul", "a bias in float32", cast(2, torch.float32), "documents"),
    Fault(LINEAR, "matmul", "trans_w for trans_b", rename("trans_b", "trans_w"), "signature"),
    Fault(LINEAR, "matmul", "the weight as it is not stored", put("trans_b", False), "documents"),
    Fault(STORED, "matmul", "the default of trans_b", without("trans_b"), "documents"),
    Fault(
        EIGHT, "scaled_matmul", "the older order", lambda a, k: ([a[0], a[2], a[1], *a[3:]], k), "documents"
    ),
    Fault(EIGHT, "scaled_matmul", "scales as columns", at(3, lambda x: x[:, None]), "documents"),
    Fault(EIGHT, "scaled_matmul", "scales in float16", cast(2, DTYPE), "documents"),
    Fault(EIGHT, "scaled_matmul", "scales exchanged", swap(2, 3), "documents"),
    Fault(EIGHT, "scaled_matmul", "the bits of float activations", without("a_quant_bit_size"), "documents"),
    Fault(EIGHT, "scaled_matmul", "a result in float32", at(4, lambda x: torch.float32), "documents"),
    Fault(FILL, "reshape_paged_cache", "slots in int64", cast(4, torch.int64), "documents"),
    Fault(
        FILL, "reshape_paged_cache", "caches first", lambda a, k: ([*a[2:4], *a[:2], a[4]], k), "documents"
    ),
    Fault(FILL, "reshape_paged_cache", "values before keys", swap(0, 1), "numbers"),
    Fault(FILL, "reshape_paged_cache", "keys with gaps", gaps(0), "documents"),
    Fault(
        FILL, "reshape_paged_cache", "blocks before heads", at(2, lambda x: x.transpose(1, 2)), "documents"
    ),
    Fault(FILL, "reshape_paged_cache", "slot_indices", by_name(4, "slot_indices"), "signature"),
    Fault(PREFILL, FLASH, "lengths for their sums", at(4, lambda x: x.diff()), "documents"),
    Fault(PREFILL, FLASH, "sums in int64", cast(5, torch.int64), "documents"),
    Fault(PREFILL, FLASH, "values before keys", swap(1, 2), "numbers"),
    Fault(PREFILL, FLASH, "the longest is one less", at(8, lambda x: x - 1), "documents"),
    Fault(PREFILL, FLASH, "the scale before the longest", swap(9, 10), "signature"),
    Fault(PREFILL, FLASH, "not causal", at(11, lambda x: False), "numbers"),
    Fault(PREFILL, FLASH, "a query in bfloat16", cast(0, torch.bfloat16), "documents"),
    Fault(PREFILL, FLASH, "heads before tokens", at(0, lambda x: x.transpose(0, 1)), "documents"),
    Fault(PREFILL, FLASH, "one argument less", lambda a, k: (a[:11], k), "signature"),
    Fault(WINDOW, FLASH, "a window of one less", at(12, lambda x: x - 1), "numbers"),
    Fault(WINDOW, FLASH, "no window", at(12, lambda x: -1), "numbers"),
    Fault(PAGED, FLASH, "block_table for block_tables", rename("block_tables", "block_table"), "signature"),
    Fault(PAGED, FLASH, "blocks in int64", cast("block_tables", torch.int64), "documents"),
    Fault(PAGED, FLASH, "slots before heads", at(1, lambda x: x.transpose(1, 2).contiguous()), "documents"),
    Fault(PAGED, FLASH, "no tables", without("block_tables"), "documents"),
    Fault(
        PAGED,
        FLASH,
        "queries' sums for keys'",
        lambda a, k: ([*a[:5], a[4], *a[6:9], a[8], *a[10:]], k),
        "numbers",
    ),
    Fault(DECODE, SINGLE, "queries of three dimensions", at(0, lambda x: x[:, 0]), "documents"),
    Fault(DECODE, SINGLE, "lengths before tables", swap(4, 5), "documents"),
    Fault(DECODE, SINGLE, "lengths in int64", cast(5, torch.int64), "documents"),
    Fault(DECODE, SINGLE, "max_contxt_len, its older name", by_name(9, "max_contxt_len"), "signature"),
    Fault(DECODE, SINGLE, "the longest is one less", at(9, lambda x: x - 1), "documents"),
    Fault(DECODE, SINGLE, "windows of 0, once unlimited", at(10, lambda x: 0), "numbers"),
    Fault(DECODE, SINGLE, "a window to the right", at(11, lambda x: 0), "documents"),
    Fault(DECODE, SINGLE, "the scale before windows", swap(10, 12), "signature"),
    Fault(DECODE, SINGLE, "values before keys", swap(1, 2), "numbers"),
    Fault(DECODE, SINGLE, "an output of other heads", at(3, lambda x: x[:, :, 1:]), "documents"),
    Fault(LATENTS, "reshape_paged_cache", "values without their cache", swap(1, 0), "signature"),
    Fault(LATENTS, "reshape_paged_cache", "keys alone", at(0, lambda x: x[..., :512]), "documents"),
    Fault(LATENTS, "reshape_paged_cache", "values' cache alone", at(2, lambda x: x[..., :512]), "documents"),
    Fault(
        LATENTS, "reshape_paged_cache", "the rotated part first", at(0, lambda x: x.roll(64, -1)), "numbers"
    ),
    Fault(
        LATENT,
        SINGLE,
        "values with gaps",
        lambda a, k: ([*a[:2], a[1][..., :512], *a[3:]], k | {"head_size_v": -1}),
        "documents",
    ),
    Fault(LATENT, SINGLE, "no size of values", without("head_size_v"), "documents"),
    Fault(LATENT, SINGLE, "values of the keys' size", put("head_size_v", 576), "documents"),
    Fault(LATENT, SINGLE, "head_size for head_size_v", rename("head_size_v", "head_size"), "signature"),
    Fault(LATENT, SINGLE, "queries without the rotated part", at(0, lambda x: x[..., :512]), "documents"),
    Fault(DECODE, SINGLE, "a size of values beside their cache", put("head_size_v", 64), "documents"),
    Fault(LATENT_CHUNK, FLASH, "values with gaps", at(2, lambda x: x[..., :512]), "documents"),
    Fault(LATENT_CHUNK, FLASH, "no values", at(2, lambda x: None), "signature"),
    Fault(LATENT_CHUNK, FLASH, "an output of the values", at(3, lambda x: x[..., :512]), "documents"),
    Fault(NARROW, SINGLE, "a window of one more", at(10, lambda x: x + 1), "numbers"),
    Fault(GATING, "moe_softmax_topk", "topk first", swap(0, 1), "signature"),
    Fault(GATING, "moe_softmax_topk", "one expert less", at(1, lambda x: x - 1), "numbers or signature"),
    Fault(GATING, "moe_softmax_topk", "scores with gaps", gaps(0), "documents"),
    Fault(EXPERTS, "moe_gen_idx", "ids in int64", cast(0, torch.int64), "documents"),
    Fault(EXPERTS, "moe_gen_idx", "ids in one dimension", at(0, torch.flatten), "documents"),
    Fault(EXPERTS, "moe_expand_input", "rows for tokens", at(1, lambda x: x.sort().values), "numbers"),
    Fault(EXPERTS, "moe_expand_input", "indices in int64", cast(1, torch.int64), "documents"),
    Fault(EXPERTS, "group_gemm", "sums for counts", at(2, lambda x: x.cumsum(0).int()), "documents"),
    Fault(EXPERTS, "group_gemm", "counts in int64", cast(2, torch.int64), "documents"),
    Fault(EXPERTS, "group_gemm", "the most is 1", at(7, lambda x: 1), "documents"),
    Fault(
        EXPERTS,
        "group_gemm",
        "weights [in, out]",
        at(1, lambda x: x.transpose(1, 2).contiguous()),
        "documents",
    ),
    Fault(EXPERTS, "group_gemm", "max_m, its older name", by_name(7, "max_m"), "signature"),
    Fault(EXPERTS, "moe_active", "gelu", at(1, lambda x: "gelu"), "documents"),
    Fault(EXPERTS, "moe_active", "not gated", at(2, lambda x: False), "documents"),
    Fault(EXPERTS, BACK, "weights in float16", cast(1, DTYPE), "documents"),
    Fault(EXPERTS, BACK, "indices before weights", swap(1, 2), "documents"),
    Fault(EXPERTS, BACK, "rows of the wrong way", at(2, lambda x: x.argsort().int()), "numbers"),
    Fault(EXPERTS, BACK, "no counts of experts", lambda a, k: (a[:5], k), "signature"),
    Fault(EXPERTS8, "moe_quantize", "gather_idx", rename("gather_index", "gather_idx"), "signature"),
    Fault(EXPERTS8, "moe_quantize", "factors in float16", cast(1, DTYPE), "documents"),
    Fault(EXPERTS8, "moe_quantize", "not gated", put("is_gated", False), "documents"),
    Fault(EXPERTS8, GROUPS8, "scales exchanged", swap(7, 8), "documents"),
    Fault(EXPERTS8, GROUPS8, "scales of three dimensions", at(8, lambda x: x[..., None]), "documents"),
    Fault(EXPERTS8, GROUPS8, "most before dtype", swap(9, 10), "signature or documents"),
]


def result(called: tuple[str, Callable[[], tuple]]) -> tuple[list[Tensor], list[Tensor], Any]:
    op, args = ops.registry()[called[0]], called[1]()
    want = cases.expected(op, comparing.host(op, args))
    with settings.override(fallback="error"):
        returned = op.overload(*args)
    return [one.cpu() for one in comparing.found(op, args, returned)], want, op.tolerances[DTYPE]


def test_there_are_enough():
    assert len(FAULTS) > 90
    assert len({(fault.vendors, fault.what, fault.called[0]) for fault in FAULTS}) == len(FAULTS)
    assert {fault.vendors for fault in FAULTS} == signatures.called()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.called[0]}-{fault.vendors}-{fault.what}")
def test_a_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch):
    tmo = sdk.tmo()
    unspoilt, spoilt = getattr(tmo, fault.vendors), []

    def planted(*args: Any, **kwargs: Any) -> Any:
        spoilt.append(fault.what)
        given, named = fault.change(list(args), dict(kwargs))
        return unspoilt(*given, **named)

    cases.assert_close(*result(fault.called))
    monkeypatch.setattr(tmo, fault.vendors, planted)
    caught = ""
    try:
        found = result(fault.called)
    except (DlinferError, RuntimeError) as error:
        caught = (
            f"{'documents' if 'NotAdmitted' in f'{type(error).__name__} {error}' else 'signature'}: {error}"
        )
    except (TypeError, ValueError) as error:
        caught = f"signature: {error}"
    else:
        try:
            cases.assert_close(*found)
        except AssertionError as error:
            caught = f"numbers: {error}"
    assert spoilt
    assert caught.partition(":")[0] in fault.by.split(" or "), caught or "nothing caught it"
