"""Faults put into the calls that kernels make, each of which has to be caught.

By torch where the schema tells (``schema``), by the simulation where the documents do (``documents``), by comparison
with the reference where only numbers do (``numbers``). A simulation that lets a wrong name, order or dtype pass would
prove nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer import ops, settings
from dlinfer.errors import DlinferError
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.ascend import linears
from tests.ops import cases
from tests.vendor.ascend import checks_ops, checks_sizes, real_sizes, schemas

Call = tuple[list[Any], dict[str, Any]]
Change = Callable[[list[Any], dict[str, Any]], Call]
DTYPE = torch.float16


# --- ways to spoil a call


def rename(old: str, new: str) -> Change:
    return lambda args, kw: (args, {new if name == old else name: value for name, value in kw.items()})


def by_name(place: int, name: str) -> Change:
    """A positional argument under a name that is not its own, or may not be given by place."""
    return lambda args, kw: (args[:place] + args[place + 1 :], kw | {name: args[place]})


def without(name: str) -> Change:
    return lambda args, kw: (args, {key: value for key, value in kw.items() if key != name})


def by_place(name: str) -> Change:
    return lambda args, kw: ([*args, kw[name]], {key: value for key, value in kw.items() if key != name})


def swap(one: int, other: int) -> Change:
    def change(args: list[Any], kw: dict[str, Any]) -> Call:
        args = list(args)
        args[one], args[other] = args[other], args[one]
        return args, kw

    return change


def exchange(one: str, other: str) -> Change:
    return lambda args, kw: (args, kw | {one: kw[other], other: kw[one]})


def at(place: int | str, value: Callable[[Any], Any]) -> Change:
    """By name only where it is given: of several calls of an op, not all have a mask."""

    def change(args: list[Any], kw: dict[str, Any]) -> Call:
        if isinstance(place, str):
            return args, kw | ({place: value(kw[place])} if place in kw else {})
        return [value(one) if index == place else one for index, one in enumerate(args)], kw

    return change


def put(name: str, value: Any) -> Change:
    return lambda args, kw: (args, kw | {name: value})


def cast(place: int | str, dtype: torch.dtype) -> Change:
    return at(place, lambda x: [one.to(dtype) for one in x] if isinstance(x, list) else x.to(dtype))


def gaps(place: int | str) -> Change:
    return at(place, lambda x: torch.stack((x, x), -1)[..., 0])


# --- calls to spoil


def sample(op: str, name: str) -> Callable[[], tuple]:
    return lambda: checks_ops.SAMPLES.arguments(ops.registry()[op], name, DTYPE)


def attention(op: str, name: str) -> Callable[[], tuple]:
    return sized(op, f"{name}, heads of 128, pages of 128")


def sized(op: str, name: str) -> Callable[[], tuple]:
    call = next(one for one in real_sizes.calls() if (one.op, one.name) == (op, name))
    return lambda: call.arguments(checks_sizes.maker(DTYPE))


def rotation() -> tuple:
    make = checks_sizes.maker(DTYPE)
    angles = make.tensor(5, 64, scale=3.0)
    return make.tensor(5, 4, 64), make.tensor(5, 2, 64), angles.cos(), angles.sin()


def four_bits() -> tuple:
    make = checks_sizes.maker(DTYPE)
    words = make.integers(-(2**31), 2**31, 128, 5).int(), make.integers(-(2**31), 2**31, 2, 5).int()
    return make.tensor(3, 128), words[0], (make.tensor(2, 40).abs() + 0.5) * 0.01, words[1], None, 64


NORM, ADD = (
    ("rms_norm", sample("rms_norm", "many tokens")),
    ("add_rms_norm", sample("add_rms_norm", "many tokens")),
)
ADD8 = "add_rms_norm_w8a8", sample("add_rms_norm_w8a8", "many tokens, int8")
QUANT = "dynamic_quant", sample("dynamic_quant", "many tokens, int8")
ROPE = "apply_rotary_pos_emb", rotation
PAIRS = (
    "apply_rotary_pos_emb_interleaved",
    sample("apply_rotary_pos_emb_interleaved", "LMDeploy's query and key, pairs"),
)
SILU = "silu_and_mul", sample("silu_and_mul", "many tokens")
FILL = "fill_kv_cache", sample("fill_kv_cache", "scattered")
PART = "fill_kv_cache", sample("fill_kv_cache", "values are a part of the keys")
PAGED = (
    "paged_prefill_attention",
    attention("paged_prefill_attention", "grouped heads, mixed lengths and histories"),
)
WINDOW = "paged_prefill_attention", attention("paged_prefill_attention", "window")
DECODING = "paged_decode_attention", attention("paged_decode_attention", "grouped heads, mixed lengths")
NARROW = "paged_decode_attention", attention("paged_decode_attention", "window")
LATENT = "paged_prefill_attention", sized("paged_prefill_attention", "latent, of a chunk")
GATING = "moe_gating_topk_softmax", sample("moe_gating_topk_softmax", "many tokens")
EXPERTS = "fused_moe", sample("fused_moe", "many tokens, not renormalised")
EXPERTS8 = "fused_moe_w8a8", sample("fused_moe_w8a8", "odd sizes, int8")
EIGHT = "linear_w8a8", sample("linear_w8a8", "one token, bias, int8")
EIGHTS = "linear_w8a8", sample("linear_w8a8", "many tokens, int8")
STATIC = "linear_w8a8_static", sample("linear_w8a8_static", "one token, bias")
FOUR = "weight_quant_matmul", four_bits
INDEXER = "lightning_indexer", sample("lightning_indexer", "continued")
SPARSE = "sparse_flash_attention", sample("sparse_flash_attention", "continued")
FIA = "npu_fused_infer_attention_score"
FIA2 = "npu_fused_infer_attention_score_v2"
RESHAPE = "npu_scatter_pa_kv_cache"
ROUTING, GROUPED, BACK = "npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_token_unpermute"
MATMUL8, MATMUL4 = "npu_quant_matmul", "npu_weight_quant_batchmatmul"


@dataclass(frozen=True)
class Fault:
    """One fault: in which op's call of which of the vendor's ops, and what has to catch it."""

    called: tuple[str, Callable[[], tuple]]
    vendors: str
    what: str
    change: Change
    by: str


FAULTS = [
    Fault(NORM, "npu_rms_norm", "eps for epsilon", by_name(2, "eps"), "schema"),
    Fault(NORM, "npu_rms_norm", "gamma first", swap(0, 1), "documents"),
    Fault(NORM, "npu_rms_norm", "gamma in float32", cast(1, torch.float32), "documents"),
    Fault(NORM, "npu_rms_norm", "gamma of another size", at(1, lambda x: x[:-1]), "documents"),
    Fault(ADD, "npu_add_rms_norm", "one argument more", lambda args, kw: ([*args, 1], kw), "schema"),
    Fault(ADD, "npu_add_rms_norm", "gamma second", swap(1, 2), "documents"),
    Fault(ADD, "npu_add_rms_norm", "the residual in bfloat16", cast(1, torch.bfloat16), "documents"),
    Fault(ADD8, "npu_add_rms_norm_dynamic_quant", "epsilon by place", by_place("epsilon"), "schema"),
    Fault(ADD8, "npu_add_rms_norm_dynamic_quant", "eps for epsilon", rename("epsilon", "eps"), "schema"),
    Fault(QUANT, "npu_dynamic_quant", "dst_type by place", by_place("dst_type"), "schema"),
    Fault(QUANT, "npu_dynamic_quant", "float32 rows", cast(0, torch.float32), "documents"),
    Fault(
        ROPE, "npu_apply_rotary_pos_emb", "layout BSND of 3 dimensions", at(4, lambda _: "BSND"), "documents"
    ),
    Fault(ROPE, "npu_apply_rotary_pos_emb", "mode before layout", swap(4, 5), "documents"),
    Fault(ROPE, "npu_apply_rotary_pos_emb", "mode interleave", at(5, lambda _: "interleave"), "documents"),
    Fault(ROPE, "npu_apply_rotary_pos_emb", "cos before key", swap(1, 2), "documents"),
    Fault(ROPE, "npu_apply_rotary_pos_emb", "sin before cos", swap(2, 3), "numbers"),
    Fault(PAIRS, "npu_rotary_mul", "mode half", at(3, lambda _: "half"), "numbers"),
    Fault(
        PAIRS,
        "npu_rotary_mul",
        "tables for each head",
        at(1, lambda x: x.expand(-1, -1, 6, -1).contiguous()),
        "documents",
    ),
    Fault(PAIRS, "npu_rotary_mul", "tables out of -1..1", at(1, lambda x: x * 4), "documents"),
    Fault(SILU, "npu_swiglu", "split along rows", at(1, lambda _: 0), "documents"),
    Fault(FILL, RESHAPE, "the default cache_mode, PA_NZ", without("cache_mode"), "documents"),
    Fault(FILL, RESHAPE, "slots in float32", cast(4, torch.float32), "documents"),
    Fault(FILL, RESHAPE, "slot_indices for slot_mapping", by_name(4, "slot_indices"), "schema"),
    Fault(
        FILL, RESHAPE, "caches first", lambda args, kw: ([*args[2:4], *args[:2], args[4]], kw), "documents"
    ),
    Fault(FILL, RESHAPE, "a slot twice", at(4, torch.zeros_like), "numbers"),
    Fault(FILL, RESHAPE, "keys with gaps", gaps(0), "documents"),
    Fault(
        PART,
        "npu_scatter_nd_update_",
        "offsets before blocks",
        at(1, lambda x: x.flip(-1)),
        "documents or numbers",
    ),
    Fault(PART, "npu_scatter_nd_update_", "slots for places", at(1, lambda x: x[:, :1]), "documents"),
    Fault(
        PAGED, FIA, "num_query_heads, of the second version", rename("num_heads", "num_query_heads"), "schema"
    ),
    Fault(
        PAGED,
        FIA,
        "actual_seq_kvlen, of the second version",
        rename("actual_seq_lengths_kv", "actual_seq_kvlen"),
        "schema",
    ),
    Fault(PAGED, FIA, "softmax_scale for scale", rename("scale", "softmax_scale"), "schema"),
    Fault(PAGED, FIA, "no scale", without("scale"), "numbers"),
    Fault(PAGED, FIA, "no num_key_value_heads", without("num_key_value_heads"), "documents"),
    Fault(PAGED, FIA, "layout TND of 4 dimensions", put("input_layout", "TND"), "documents"),
    Fault(PAGED, FIA, "a block table in int64", cast("block_table", torch.int64), "documents"),
    Fault(PAGED, FIA, "no mask in mode 3", without("atten_mask"), "documents"),
    Fault(PAGED, FIA, "a mask of what is visible", at("atten_mask", lambda x: ~x), "documents"),
    Fault(PAGED, FIA, "a mask in float16", cast("atten_mask", DTYPE), "documents"),
    Fault(PAGED, FIA, "mode 2, from the left", put("sparse_mode", 2), "documents"),
    Fault(PAGED, FIA, "no block_size", without("block_size"), "documents"),
    Fault(
        PAGED,
        FIA,
        "lengths exchanged",
        exchange("actual_seq_lengths", "actual_seq_lengths_kv"),
        "documents or numbers",
    ),
    Fault(PAGED, FIA, "values before keys", swap(1, 2), "numbers"),
    Fault(PAGED, FIA, "a query in the other dtype", cast(0, torch.bfloat16), "documents"),
    Fault(WINDOW, FIA, "no pre_tokens", without("pre_tokens"), "numbers"),
    Fault(
        WINDOW, FIA, "pre_tokens and next_tokens exchanged", exchange("pre_tokens", "next_tokens"), "numbers"
    ),
    Fault(DECODING, FIA, "no lengths", without("actual_seq_lengths_kv"), "documents"),
    Fault(DECODING, FIA, "heads before tokens", at(0, lambda x: x.transpose(1, 2).contiguous()), "documents"),
    Fault(NARROW, FIA, "the window inside out", at("atten_mask", lambda x: ~x), "numbers"),
    Fault(
        NARROW,
        FIA,
        "a mask [sequences, keys]",
        at("atten_mask", lambda x: x[:, 0, 0].contiguous()),
        "documents",
    ),
    Fault(
        GATING,
        "npu_moe_gating_top_k_softmax",
        "k second",
        lambda args, kw: ([args[0], args[2]], kw),
        "schema",
    ),
    Fault(GATING, "npu_moe_gating_top_k_softmax", "topk for k", by_name(2, "topk"), "schema"),
    Fault(EXPERTS, ROUTING, "ids in int64", cast(1, torch.int64), "documents"),
    Fault(
        EXPERTS,
        ROUTING,
        "all experts but the last",
        at("active_expert_range", lambda x: [0, x[1] - 1]),
        "documents",
    ),
    Fault(EXPERTS, ROUTING, "sums for counts", put("expert_tokens_num_type", 0), "documents"),
    Fault(EXPERTS, ROUTING, "indices of the other type", put("row_idx_type", 1), "numbers"),
    Fault(EXPERTS, ROUTING, "num_experts for expert_num", rename("expert_num", "num_experts"), "schema"),
    Fault(EXPERTS, GROUPED, "counts in int32", cast("group_list", torch.int32), "documents"),
    Fault(EXPERTS, GROUPED, "counts as sums", put("group_list_type", 0), "documents"),
    Fault(EXPERTS, GROUPED, "weights as stored", at(1, lambda x: [x[0].transpose(1, 2)]), "documents"),
    Fault(EXPERTS, GROUPED, "several results", put("split_item", 0), "documents"),
    Fault(EXPERTS, GROUPED, "weights without a list", at(1, lambda x: x[0]), "schema or documents"),
    Fault(EXPERTS, BACK, "weights in float32", cast("probs", torch.float32), "documents"),
    Fault(EXPERTS, BACK, "rows in int64", cast(1, torch.int64), "documents"),
    Fault(EXPERTS, BACK, "scales for probs", rename("probs", "scales"), "schema"),
    Fault(
        EXPERTS8,
        GROUPED,
        "pertoken_scale for per_token_scale",
        rename("per_token_scale", "pertoken_scale"),
        "schema",
    ),
    Fault(EXPERTS8, GROUPED, "scales of float16 in bfloat16", cast("scale", torch.bfloat16), "documents"),
    Fault(EIGHT, MATMUL8, "no output_dtype", without("output_dtype"), "documents"),
    Fault(
        EIGHT,
        MATMUL8,
        "per_token_scale for pertoken_scale",
        rename("pertoken_scale", "per_token_scale"),
        "schema",
    ),
    Fault(EIGHT, MATMUL8, "a scale for each row as a column", at(2, lambda x: x.unsqueeze(-1)), "documents"),
    Fault(EIGHT, MATMUL8, "a weight as stored", at(1, lambda x: x.t()), "documents"),
    Fault(EIGHT, MATMUL8, "a bias in bfloat16", cast("bias", torch.bfloat16), "documents"),
    Fault(EIGHTS, MATMUL8, "scales in float16", cast(2, DTYPE), "documents"),
    Fault(STATIC, MATMUL8, "a bias in float16", cast("bias", DTYPE), "documents"),
    Fault(STATIC, "npu_quantize", "products for quotients", put("div_mode", False), "documents"),
    Fault(STATIC, "npu_quantize", "zero points in float32", cast(2, torch.float32), "documents"),
    Fault(FOUR, MATMUL4, "no group size", without("antiquant_group_size"), "documents"),
    Fault(FOUR, MATMUL4, "offsets of the other sign", at("antiquant_offset", lambda x: -x), "numbers"),
    Fault(FOUR, MATMUL4, "scales in float32", cast(2, torch.float32), "documents"),
    Fault(FOUR, MATMUL4, "scale for antiquant_scale", by_name(2, "scale"), "schema"),
    Fault(
        FOUR,
        "npu_convert_weight_to_int4pack",
        "numbers of 0..15",
        at(0, lambda x: x + AWQ.middle),
        "documents",
    ),
    Fault(LATENT, FIA2, "names of the first version", rename("softmax_scale", "scale"), "schema"),
    Fault(LATENT, FIA2, "keys before queries", swap(0, 1), "documents"),
    Fault(LATENT, FIA2, "without what is rotated", without("query_rope"), "documents"),
    Fault(LATENT, FIA2, "the ropes exchanged", exchange("query_rope", "key_rope"), "documents"),
    Fault(LATENT, FIA2, "rotated keys with gaps", gaps("key_rope"), "documents"),
    Fault(LATENT, FIA2, "rows without a mask", without("atten_mask"), "documents"),
    Fault(LATENT, FIA2, "pages of 64", put("block_size", 64), "documents"),
    Fault(LATENT, FIA2, "scale left out", without("softmax_scale"), "numbers"),
    Fault(INDEXER, "npu_lightning_indexer", "keys not in pages", put("layout_key", "BSND"), "documents"),
    Fault(
        INDEXER,
        "npu_lightning_indexer",
        "lengths in int64",
        cast("actual_seq_lengths_key", torch.int64),
        "documents",
    ),
    Fault(INDEXER, "npu_lightning_indexer", "weights second", swap(1, 2), "documents"),
    Fault(SPARSE, "npu_sparse_flash_attention", "positions in int64", cast(3, torch.int64), "documents"),
    Fault(SPARSE, "npu_sparse_flash_attention", "scale before positions", swap(3, 4), "schema"),
    Fault(
        SPARSE,
        "npu_sparse_flash_attention",
        "actual_seq_lengths_key",
        rename("actual_seq_lengths_kv", "actual_seq_lengths_key"),
        "schema",
    ),
    Fault(
        SPARSE,
        "npu_sparse_flash_attention",
        "the ropes exchanged",
        exchange("query_rope", "key_rope"),
        "documents",
    ),
]


def result(called: tuple[str, Callable[[], tuple]]) -> tuple[list[Tensor], list[Tensor], Any]:
    op, args = ops.registry()[called[0]], called[1]()
    host = tuple(one.cpu() if isinstance(one, Tensor) else one for one in args)
    want = cases.expected(op, host)
    with settings.override(fallback="error"):
        returned = op.overload(*args)
    return [one.cpu() for one in cases.results(op, args, returned)], want, op.tolerances[DTYPE]


ONLY_CAPTURED = {
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_infer_output",
}
"""Calls of captured steps, whose faults are in ``capture/checks_steps.py``."""


def test_there_are_enough():
    assert len(FAULTS) > 80
    assert len({(fault.vendors, fault.what, fault.called[0]) for fault in FAULTS}) == len(FAULTS)
    assert {fault.vendors for fault in FAULTS} | {"_npu_paged_attention_mla"} | ONLY_CAPTURED == {
        name.partition("::")[2] for name in schemas.called()
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.vendors}-{fault.what}")
def test_a_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch):
    real, spoilt = getattr(torch.ops.npu, fault.vendors), []

    def planted(*args: Any, **kwargs: Any) -> Any:
        spoilt.append(fault.what)
        given, named = fault.change(list(args), dict(kwargs))
        return real(*given, **named)

    good = result(fault.called)
    cases.assert_close(*good)
    monkeypatch.setitem(torch.ops.npu.__dict__, fault.vendors, planted)
    monkeypatch.setattr(linears, "_PREPARED", linears._PreparedWeights())  # none that a good call has made
    caught = ""
    try:
        found = result(fault.called)
    except DlinferError as error:
        caught = f"documents: {error}"
    except TypeError as error:
        caught = f"schema: {error}"
    except RuntimeError as error:
        text = str(error)
        is_documents = type(error).__name__ == "NotAdmittedError" or "NotAdmittedError" in text
        caught = f"{'documents' if is_documents else 'schema'}: {text}"
    else:
        try:
            cases.assert_close(*found)
        except AssertionError as error:
            caught = f"numbers: {error}"
    assert spoilt
    assert caught.partition(":")[0] in fault.by.split(" or "), caught or "nothing caught it"
