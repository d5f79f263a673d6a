"""Wrong calls are refused by our own classes, naming op, argument, what was expected and what was given."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer import ops, vendor
from dlinfer.errors import KernelFailureError, OpArgumentError, OpCallError, UnsupportedFeatureError
from dlinfer.utils.type_annotation import MoeMetadata
from tests.ops import cases


def arguments(op: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The torch op's arguments of its first sample, by name."""
    spec = ops.registry()[op]
    return dict(zip(spec.parameters, cases.samples(spec, dtype)[0].args, strict=True))


def tensors(op: str) -> list[str]:
    return [name for name, value in arguments(op).items() if isinstance(value, Tensor)]


ALL_TENSORS = [(op, name) for op in ops.registry() for name in tensors(op)]
HOST_LENGTHS = {"q_ends", "kv_seqlens", "actual_seq_lengths_query", "actual_seq_lengths_key"}  # on any device
ANY_RANK = {"x", "indices", "router_logits", "cos", "sin", "scores"}
FREE_SIZES = {  # dimensions that no other argument fixes
    ("all_reduce", "x"): (0, 1),
    ("dynamic_quant", "x"): (0, 1, 2),
    ("rms_norm_w8a8", "x"): (0, 1),
    ("linear_w8a8_static", "x"): (0, 1),
    ("linear_blocked_fp8", "x"): (0, 1),
    ("linear_static_fp8", "x"): (0, 1),
    ("rms_norm", "x"): (0, 1),
    ("silu_and_mul", "x"): (0, 1),
    ("linear", "x"): (0, 1),
    ("linear", "weight"): (0,),
    ("linears", "x"): (0, 1),
    ("weight_quant_matmul", "x"): (0,),
    ("linear_bf12", "x"): (0,),
    ("embedding_bf12", "indices"): (0,),
    ("linear_gguf", "x"): (0,),
    ("embedding_gguf", "indices"): (0, 1),
    ("apply_rotary_pos_emb", "q"): (1,),
    ("apply_rotary_pos_emb", "k"): (1,),
    ("apply_rotary_pos_emb_interleaved", "native_input"): (1, 2),
    ("moe_gating_topk_softmax", "router_logits"): (0, 1),
    ("lightning_indexer", "key"): (0, 1),
    ("lightning_indexer", "block_table"): (1,),
    ("sparse_flash_attention", "sparse_indices"): (2,),
    ("sparse_flash_attention", "block_table"): (1,),
    ("sparse_flash_attention", "value"): (3,),
    ("compressed_indexer", "key"): (0, 1),
    ("compressed_indexer", "block_table"): (1,),
    ("compressed_attention", "window_state"): (0, 1),
    ("compressed_attention", "compressed"): (0, 1),
    ("compressed_attention", "block_table"): (1,),
    ("compressed_attention", "chosen"): (2,),
    ("compress_windows", "state"): (0, 2),
    ("sinkhorn", "scores"): (0, 1),
    ("causal_conv1d", "conv_state"): (0,),
    ("gated_delta_rule", "recurrent_state"): (0,),
    ("paged_prefill_attention", "k_cache"): (0,),
    ("paged_prefill_attention", "v_cache"): (0,),
    ("paged_prefill_attention", "block_offsets"): (1,),
    ("paged_decode_attention", "k_cache"): (0,),
    ("paged_decode_attention", "v_cache"): (0,),
    ("paged_decode_attention", "block_offsets"): (1,),
    ("quantised_paged_prefill_attention", "block_offsets"): (1,),
    ("quantised_paged_decode_attention", "block_offsets"): (1,),
}


def refused(op: str, **changes: Any) -> OpArgumentError:
    """The error of the torch op's call with some arguments changed; the same on the kernel and on fakes."""
    call = ops.registry()[op].overload
    with pytest.raises(OpArgumentError) as caught:
        call(**(arguments(op) | changes))
    assert caught.value.fields["op"] == op
    assert str(caught.value.fields["expected"]) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("op", "name"), ALL_TENSORS)
def test_wrong_dtype(op, name):
    given = arguments(op)[name]
    wrong = torch.complex64 if given.is_floating_point() else torch.float32
    error = refused(op, **{name: given.to(wrong)})
    assert error.fields["argument"] in tensors(op)
    assert str(wrong) in str(error) or "like" in str(error)


@pytest.mark.parametrize(("op", "name"), [pair for pair in ALL_TENSORS if pair[1] not in ANY_RANK])
def test_wrong_rank(op, name):
    assert "dimension" in str(refused(op, **{name: arguments(op)[name][None, None]}))


def floating(op: str) -> list[str]:
    """Tensors that must share one dtype; weights of chosen experts, some scales, gates and states may be of another,
    and float8 is."""
    apart = ("topk_weights", "scalings", "scales", "input_scale", "gate_up_scales")
    apart += ("decay", "beta", "recurrent_state", "sinks", "position_bias", "state")
    given = {n: tensor for n in tensors(op) if (tensor := arguments(op)[n]).is_floating_point()}
    return [n for n, tensor in given.items() if n not in apart and tensor.element_size() > 1]


@pytest.mark.parametrize(("op", "name"), [(op, n) for op in ops.registry() for n in floating(op)[1:]])
def test_mixed_dtypes(op, name):
    error = refused(op, **{name: arguments(op)[name].half()})
    assert error.fields["argument"] == name
    assert (error.fields["expected"].split()[0], str(error.fields["given"])) == (
        "torch.float32",
        "torch.float16",
    )


def on_device(op: str) -> list[str]:
    return [name for name in tensors(op) if name not in HOST_LENGTHS]


@pytest.mark.parametrize(
    ("op", "name"), [(op, n) for op in ops.registry() for n in on_device(op) if len(on_device(op)) > 1]
)
def test_wrong_device(op, name):
    error = refused(op, **{name: arguments(op)[name].to("meta")})
    assert {str(error.fields["given"]), str(error.fields["expected"]).split()[3]} == {"cpu", "meta"}


@pytest.mark.parametrize(
    ("op", "name", "dim"),
    [
        (op, name, dim)
        for op, name in ALL_TENSORS
        for dim in range(arguments(op)[name].dim())
        if dim not in FREE_SIZES.get((op, name), ())
    ],
)
def test_a_size_that_does_not_fit(op, name, dim):
    given = arguments(op)[name]
    refused(op, **{name: torch.cat([given, given.narrow(dim, 0, 1)], dim)})


@pytest.mark.parametrize("op", ["paged_prefill_attention", "paged_decode_attention"])
def test_wrong_block_size(op):
    error = refused(op, block_size=32)
    assert error.fields == {
        "op": op,
        "argument": "block_size",
        "expected": "8, the block size of k_cache",
        "given": 32,
    }


@pytest.mark.parametrize(
    ("op", "changes", "argument"),
    [
        ("rms_norm", {"eps": 0.0}, "eps"),
        ("silu_and_mul", {"x": torch.randn(2, 5)}, "x"),
        ("apply_rotary_pos_emb", {"q": torch.randn(9, 4, 15)}, "q"),
        ("moe_gating_topk_softmax", {"topk": 9}, "topk"),
        ("moe_gating_topk_softmax", {"topk": 0}, "topk"),
        ("moe_gating_topk_softmax", {"topk": 3, "n_groups": 2}, "n_groups"),
        ("moe_gating_topk_softmax", {"topk": 6, "n_groups": 3}, "n_groups"),
        ("fused_moe", {"topk": 3}, "topk_weights"),
        ("fused_moe", {"topk_ids": torch.tensor([[0, 8]])}, "topk_ids"),
        ("fused_moe", {"topk_ids": torch.tensor([[-1, 7]])}, "topk_ids"),
        ("fused_moe_bf12", {"topk_ids": torch.tensor([[0, 8]])}, "topk_ids"),
        ("fused_moe_bf12", {"topk_ids": torch.tensor([[-1, 7]])}, "topk_ids"),
        ("fused_moe_bf12", {"num_experts": -1}, "num_experts"),
        ("fused_moe_bf12", {"num_experts": 9}, "gate_up_weights"),
        ("fused_moe_bf12", {"intermediate_size": -1}, "intermediate_size"),
        ("fused_moe_bf12", {"intermediate_size": 49}, "gate_up_weights"),
        ("fused_moe_clamped", {"topk_ids": torch.tensor([[0, 8]])}, "topk_ids"),
        ("fused_moe_clamped", {"limit": 0.0}, "limit"),
        ("fused_moe_mxfp4", {"limit": 0.0}, "limit"),
        ("fused_moe_limited", {"limit": 0.0}, "limit"),
        ("fused_moe_limited", {"topk_ids": torch.tensor([[0, 8]])}, "topk_ids"),
        ("fused_moe_limited_mxfp4", {"limit": 0.0}, "limit"),
        ("fused_moe_limited_mxfp4", {"topk_ids": torch.tensor([[0, 8]])}, "topk_ids"),
        ("sinkhorn", {"iterations": 0}, "iterations"),
        ("compressed_indexer", {"count": 0}, "count"),
        ("compressed_indexer", {"ratio": 0}, "ratio"),
        ("compressed_attention", {"ratio": 0}, "ratio"),
        ("compressed_attention", {"state_ids": torch.tensor([0, 5, 1])}, "state_ids"),
        ("compressed_attention", {"q_ends": torch.tensor([2, 1, 3])}, "q_ends"),
        ("compress_windows", {"state_ids": torch.tensor([6])}, "state_ids"),
        ("compress_windows", {"q_ends": torch.tensor([10])}, "q_ends"),
        ("compress_windows", {"state": torch.zeros(6, 2, 7, 16)}, "state"),
        ("fused_moe_mxfp4", {"topk_ids": torch.tensor([[0, 8]])}, "topk_ids"),
        ("fused_moe_w4a16", {"topk_ids": torch.tensor([[-1, 7]])}, "topk_ids"),
        ("fused_moe_w4a16", {"group_size": -1}, "group_size"),
        ("linear_bf12", {"out_features": -1}, "out_features"),
        ("linear_bf12", {"out_features": 49}, "weight"),
        ("linear_gguf", {"types": [5]}, "types"),
        ("linear_gguf", {"rows": [-1]}, "rows"),
        ("linear_gguf", {"rows": [11, 2]}, "rows"),
        ("linear_gguf", {"rows": [12]}, "weight"),
        ("linear_gguf", {"types": [12]}, "weight"),
        ("embedding_gguf", {"rows": 25}, "weight"),
        ("embedding_gguf", {"dtype": torch.int8}, "dtype"),
        ("embedding_gguf", {"indices": torch.tensor([0, 24])}, "indices"),
        ("embedding_gguf", {"indices": torch.tensor([3, -1])}, "indices"),
        ("fused_moe_gguf", {"topk_ids": torch.tensor([[0, 8]])}, "topk_ids"),
        ("fused_moe_gguf", {"topk_ids": torch.tensor([[-1, 7]])}, "topk_ids"),
        ("fused_moe_gguf", {"intermediate_size": 64}, "gate_up_weights"),
        ("fused_moe_gguf", {"down_type": 2}, "down_weights"),
        ("embedding_bf12", {"rows": -1}, "rows"),
        ("embedding_bf12", {"columns": -1}, "columns"),
        ("embedding_bf12", {"columns": 129}, "weight"),
        ("embedding_bf12", {"indices": torch.tensor([0, 64])}, "indices"),
        ("embedding_bf12", {"indices": torch.tensor([3, -1])}, "indices"),
        ("prefill_attention", {"num_kv_heads": 3}, "num_kv_heads"),
        ("prefill_attention", {"num_q_heads": 2}, "q"),
        ("paged_decode_attention", {"num_kv_heads": 4}, "k_cache"),
        ("paged_decode_attention", {"sinks": torch.randn(5)}, "sinks"),
        ("paged_prefill_attention", {"alibi_slopes": torch.randn(2, 2)}, "alibi_slopes"),
        ("fill_kv_cache", {"kv_start_indices": torch.arange(9) + 30}, "kv_start_indices"),
        ("causal_conv1d", {"state_ids": torch.tensor([2, 6, 5])}, "state_ids"),
        ("causal_conv1d", {"q_ends": torch.tensor([2, 1, 3])}, "q_ends"),
        ("gated_delta_rule", {"state_ids": torch.tensor([2, 6, 5])}, "state_ids"),
        ("gated_delta_rule", {"q_ends": torch.tensor([1, 2, 4])}, "q_ends"),
    ],
)
@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
def test_wrong_values(vendor_name, op, changes, argument):
    vendor.use(vendor_name)
    assert refused(op, **changes).fields["argument"] == argument


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
@pytest.mark.parametrize("op", ["fused_moe_w8a8", "fused_moe_blocked_fp8", "fused_moe_static_fp8"])
def test_experts_without_intermediate_numbers(op, vendor_name):
    """Rows of none have no largest one, which 8-bit numbers are scaled by."""
    vendor.use(vendor_name)
    given = arguments(op)
    names = ("gate_up_weights", "gate_up_scales", "down_weights", "down_scales")
    changes = {name: given[name][:, :0] for name in names[:2]}
    changes |= {"down_weights": given["down_weights"][..., :0]}
    if op == "fused_moe_blocked_fp8":
        changes |= {"down_scales": given["down_scales"][..., :0]}
    error = refused(op, **changes)
    assert (error.fields["argument"], error.fields["expected"]) == (
        "down_weights",
        "an intermediate size of at least 1",
    )


def test_a_slot_behind_the_cache_writes_nothing():
    args = arguments("fill_kv_cache")
    before = args["k_cache"].clone()
    with pytest.raises(OpArgumentError, match="slots below 32, given 38"):
        ops.fill_kv_cache(**args | {"kv_start_indices": torch.arange(9) + 30})
    assert torch.equal(args["k_cache"], before)


# --- calls that do not fit


@pytest.mark.parametrize("op", ops.registry())
def test_calls_that_do_not_fit_the_signature(op):
    for args, kwargs in (((), {}), ((torch.randn(2, 2),) * 30, {}), ((), {"no_such_keyword": 1})):
        with pytest.raises(OpCallError, match=rf"dlinfer\.ops\.{op}: the call does not match") as caught:
            ops.registry()[op](*args, **kwargs)
        assert str(ops.registry()[op].signature()) in str(caught.value)


@pytest.mark.parametrize("op", ops.registry())
def test_a_list_where_a_tensor_belongs(op):
    spec = ops.registry()[op]
    parameters = list(spec.signature().parameters)
    filler = {
        name: torch.randn(2, 2)
        for name in parameters
        if spec.signature().parameters[name].default is inspect._empty
    }
    with pytest.raises(OpArgumentError, match=f"argument {parameters[0]}: expected a tensor, given \\[1.0"):
        spec(**filler | {parameters[0]: [1.0, 2.0]})


def test_wrong_scalar():
    with pytest.raises(OpCallError, match="rms_norm"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(8), "tiny")


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
def test_a_fault_while_computing_is_not_blamed_on_the_call(vendor_name):
    vendor.use(vendor_name)
    args = arguments("paged_decode_attention")
    nowhere = torch.full_like(args["block_offsets"], 999)
    pages = (args["k_cache"], args["v_cache"], nowhere, 8)
    with pytest.raises(KernelFailureError, match="index"):
        ops.paged_decode_attention(args["q"], *pages, args["kv_seqlens"], args["kv_seqlens"], 40, 4, 2)


# --- refused by name


def decode(**extra: Any) -> Tensor:
    args = arguments("paged_decode_attention")
    pages = (args["k_cache"], args["v_cache"], args["block_offsets"], 8)
    return ops.paged_decode_attention(
        args["q"], *pages, args["kv_seqlens"], args["kv_seqlens"], 40, 4, 2, **extra
    )


@pytest.mark.parametrize(
    ("feature", "call"),
    [
        ("a quantised KV cache (quant_bits=8)", lambda: decode(quant_bits=8)),
        ("a quantised KV cache", lambda: decode(kv_scales=torch.ones(1))),
        ("an explicit attn_mask", lambda: decode(attn_mask=[torch.ones(2, 2)])),
        (
            "a quantised KV cache (quant_bits=4)",
            lambda: ops.fill_kv_cache(**arguments("fill_kv_cache"), quant_bits=4),
        ),
        (
            "a quantised KV cache",
            lambda: ops.fill_kv_cache(**arguments("fill_kv_cache"), k_scales_zeros=[torch.ones(1)]),
        ),
        (
            "expert parallelism (ep_size=2)",
            lambda: ops.fused_moe(*arguments("fused_moe").values(), MoeMetadata(ep_size=2), None),
        ),
        (
            "a chunked weight layout",
            lambda: ops.fused_moe(*arguments("fused_moe").values(), MoeMetadata(), object()),
        ),
        (
            "writing into q_embed and k_embed",
            lambda: ops.apply_rotary_pos_emb(*arguments("apply_rotary_pos_emb").values(), torch.ones(1)),
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(feature, call):
    with pytest.raises(UnsupportedFeatureError, match="Next step") as caught:
        call()
    assert feature in caught.value.fields["feature"]


def test_neutral_values_of_unserved_arguments_are_taken():
    expected = decode()
    assert torch.equal(decode(quant_bits=None, kv_scales=None, kv_zeros=None, attn_mask=[None]), expected)
    assert torch.equal(decode(logit_softcapping=None, sliding_window=-1, causal=True), expected)
