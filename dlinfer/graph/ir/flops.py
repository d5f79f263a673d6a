"""Count floating-point operations, so that a report can give the engine's share of the work.

Matrix products, convolutions and attention count 2 operations for each multiplication with its addition. Other ops
count 0. Symbolic sizes take their values from the captured call. A size without a value in that call counts as 1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dlinfer.graph.ir.dialect import arguments, fake, schema_name
from dlinfer.graph.torch_private.symbols import example_number

Call = Mapping[str, Any]
"""The arguments of an op by parameter name, with fakes in place of nodes."""


def flops_of(node: fx.Node) -> int:
    """Return the floating-point operations of one node; 0 if ``is_product`` is false."""
    count = _COUNTS.get(schema_name(node))
    return 0 if count is None else count(map_arg(arguments(node), fake), fake(node))


def is_product(node: fx.Node) -> bool:
    """Return whether a node is a matrix product, a convolution or an attention."""
    return schema_name(node) in _COUNTS


def _sizes(tensor: Tensor) -> list[int]:
    return [example_number(size, unknown=1) for size in tensor.shape]


def _elements(results: object) -> int:
    return sum(math.prod(_sizes(tensor)) for tensor in pytree.tree_leaves(results))


def _product(left: str) -> Callable[[Call, object], int]:
    """Return a counter for a product of two matrices, or of two batches. left: the left operand's parameter name."""
    return lambda call, result: 2 * _elements(result) * (_sizes(call[left]) or [1])[-1]


def _einsum(call: Call, result: object) -> int:
    """Count a multiplication and an addition for each combination of the letters' values. An ellipsis counts as 1."""
    letters: dict[str, int] = {}
    for term, tensor in zip(call["equation"].split("->")[0].split(","), call["tensors"], strict=True):
        letters |= dict(zip(term.strip().replace(".", ""), _sizes(tensor), strict=False))
    return 2 * math.prod(letters.values())


def _convolution(call: Call, result: object) -> int:
    return 2 * _elements(result) * math.prod(_sizes(call["weight"])[1:])


def _attention(call: Call, result: object) -> int:
    """Count the products of every query with every key, even with a causal mask."""
    q, keys = _sizes(call["query"]), _sizes(call["key"])[-2]
    return 2 * math.prod(q[:-1]) * keys * (q[-1] + _sizes(call["value"])[-1])


def _packed_attention(call: Call, result: object) -> int:
    """Count an attention op of dlinfer as if each token's query met as many keys as the longest sequence has."""
    tokens, heads, size = _sizes(call["q"])
    keys = example_number(call.get("max_kv_seq_len", call.get("max_q_seq_len")))
    if "k" in call and "k_cache" not in call:  # packed keys cannot be more than there are
        keys = min(keys, _sizes(call["k"])[0])
    return 2 * tokens * heads * keys * (size + _sizes(call["attn_output"])[-1])


def _indexer(call: Call, result: object) -> int:
    """Count the scores of the lightning indexer: every query with all slots in the blocks of its sequence."""
    slots = math.prod(_sizes(call["key"])[1:]) // max(_sizes(call["query"])[-1], 1)
    return 2 * math.prod(_sizes(call["query"])) * _sizes(call["block_table"])[1] * slots


def _sparse_attention(call: Call, result: object) -> int:
    """Count sparse attention: each query meets as many keys as ``sparse_indices`` has positions per query."""
    chosen, rope = _sizes(call["sparse_indices"])[-1], call["query_rope"]
    return 2 * chosen * sum(map(_elements, (call["query"], rope, result)))


def _compressed_attention(call: Call, result: object) -> int:
    """Count compressed attention: each query meets all keys of a window, and the chosen entries or all entries."""
    keys = _sizes(call["window_state"])[1]
    if call["chosen"] is not None:
        keys += _sizes(call["chosen"])[-1]
    elif call["compressed"] is not None:
        size = max(_sizes(call["query"])[-1], 1)
        keys += _sizes(call["block_table"])[1] * (math.prod(_sizes(call["compressed"])[1:]) // size)
    return 2 * 2 * _elements(call["query"]) * keys


def _delta_rule(call: Call, result: object) -> int:
    """Count three products for each token and head: state by key, state by query, and the update of the state."""
    return 3 * 2 * _elements(call["value"]) * _sizes(call["recurrent_state"])[-1]


def _lora(call: Call, result: object) -> int:
    """Count LoRA as if each token had an adapter of the mean rank."""
    rows, adapters = _sizes(call["a"])[0], _sizes(call["ranks"])[0]
    return 2 * _elements([call["x"], call["base"]]) * rows // max(adapters, 1)


def _experts(intermediate: Callable[[Call], int]) -> Callable[[Call, object], int]:
    """Return a counter for the products of a MoE op's chosen experts.

    intermediate: reads the inner size of an expert from a call.
    """

    def count(call: Call, result: object) -> int:
        tokens, hidden = _sizes(call["hidden_states"])
        return 2 * tokens * _sizes(call["topk_ids"])[1] * 3 * hidden * intermediate(call)

    return count


_EXPERTS = _experts(lambda call: _sizes(call["down_weights"])[2])  # [experts, out, in]
_PACKED_EXPERTS = _experts(lambda call: _sizes(call["down_weights"])[1])  # [experts, in, words of out]

_COUNTS: dict[str, Callable[[Call, object], int]] = {
    "aten::linear": _product("input"),
    **{
        f"dlinfer::{name}": _product("x")
        for name in (
            *("linear", "linears", "weight_quant_matmul", "linear_bf12", "linear_gguf"),
            *("linear_w8a8_static", "linear_blocked_fp8", "linear_static_fp8"),
        )
    },
    "dlinfer::linear_w8a8": _product("a"),
    "dlinfer::lora_linear": _lora,
    **{f"aten::{name}": _product("self") for name in ("mm", "bmm", "matmul", "mv", "dot", "_grouped_mm")},
    "aten::addmm": _product("mat1"),
    "aten::addmv": _product("mat"),
    "aten::baddbmm": _product("batch1"),
    "aten::einsum": _einsum,
    **{f"aten::conv{dims}d": _convolution for dims in (1, 2, 3)},
    **{
        f"aten::conv_transpose{dims}d": lambda call, _: _convolution(call, call["input"])
        for dims in (1, 2, 3)
    },
    "aten::convolution": lambda call, result: _convolution(
        call, call["input"] if call["transposed"] else result
    ),
    "aten::scaled_dot_product_attention": _attention,
    **{
        f"dlinfer::{name}_attention": _packed_attention
        for name in "prefill paged_prefill paged_decode quantised_paged_prefill quantised_paged_decode".split()
    },
    "dlinfer::lightning_indexer": _indexer,
    "dlinfer::compressed_indexer": _indexer,
    "dlinfer::sparse_flash_attention": _sparse_attention,
    "dlinfer::compressed_attention": _compressed_attention,
    "dlinfer::causal_conv1d": lambda call, result: 2 * _elements(call["x"]) * _sizes(call["weight"])[-1],
    "dlinfer::gated_delta_rule": _delta_rule,
    **{
        f"dlinfer::fused_moe{kind}": _EXPERTS
        for kind in ("", "_w8a8", "_static_fp8", "_blocked_fp8", "_clamped", "_limited")
    },
    "dlinfer::fused_moe_w4a16": _PACKED_EXPERTS,
    "dlinfer::fused_moe_mxfp4": _PACKED_EXPERTS,
    "dlinfer::fused_moe_limited_mxfp4": _PACKED_EXPERTS,
    **{
        f"dlinfer::fused_moe_{kind}": _experts(
            lambda call: example_number(call["intermediate_size"], unknown=1)
        )
        for kind in ("bf12", "gguf")
    },
}


def share(inside: int, outside: int) -> float:
    """Return ``inside / (inside + outside)``; 1 if both counts are 0."""
    return inside / (inside + outside) if inside + outside else 1.0
