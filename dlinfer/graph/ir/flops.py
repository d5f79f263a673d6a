"""Floating-point operations of products: what a share of them in the engine says that a share of nodes does not.

A product of matrices, a convolution or an attention is 2 operations for each multiplication and addition; everything
else counts 0. Symbolic sizes have the values of the call that was captured; those that had none there count as 1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from dlinfer.graph.ir.dialect import arguments, fake, overload
from dlinfer.graph.torch_private.symbols import example_number


def flops_of(node: fx.Node) -> int:
    """The operations of one node; 0 for what is no product."""
    op = overload(node)
    count = _COUNTS.get(op._schema.name) if op is not None else None
    if count is None:
        return 0
    given = {name: _faked(value) for name, value in arguments(node).items()}
    return count(given, fake(node))


def _faked(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_faked(item) for item in value]
    return fake(value) if isinstance(value, fx.Node) else value


def _sizes(tensor: Tensor) -> list[int]:
    return [example_number(size, unknown=1) for size in tensor.shape]


def _elements(tensor: Tensor) -> int:
    return math.prod(_sizes(tensor))


Given = Mapping[str, Any]


def _linear(given: Given, result: Tensor) -> int:
    x = given.get("input", given.get("x"))
    return 2 * _elements(result) * _sizes(x)[-1]


def _linears(given: Given, results: list[Tensor]) -> int:
    return sum(_linear(given, result) for result in results)


def _product(first: str) -> Callable[[Given, Tensor], int]:
    """Of two matrices or batches of them; ``first`` names the left one."""

    def count(given: Given, result: Tensor) -> int:
        sizes = _sizes(given[first])
        return 2 * _elements(result) * (sizes[-1] if sizes else 1)

    return count


def _einsum(given: Given, result: Tensor) -> int:
    """As one loop over all letters; an ellipsis counts as nothing."""
    letters: dict[str, int] = {}
    for term, tensor in zip(given["equation"].split("->")[0].split(","), given["tensors"], strict=True):
        letters |= dict(zip(term.strip().replace(".", ""), _sizes(tensor), strict=False))
    return 2 * math.prod(letters.values())


def _convolution(given: Given, result: Tensor) -> int:
    per_output = math.prod(_sizes(given["weight"])[1:])
    return 2 * _elements(result) * per_output


def _transposed_convolution(given: Given, result: Tensor) -> int:
    per_input = math.prod(_sizes(given["weight"])[1:])
    return 2 * _elements(given["input"]) * per_input


def _any_convolution(given: Given, result: Tensor) -> int:
    count = _transposed_convolution if given["transposed"] else _convolution
    return count(given, result)


def _attention(given: Given, result: Tensor) -> int:
    """Every query with every key; a causal mask leaves nothing out."""
    q, keys = _sizes(given["query"]), _sizes(given["key"])[-2]
    return 2 * math.prod(q[:-1]) * keys * (q[-1] + _sizes(given["value"])[-1])


def _packed_attention(given: Given, result: Any) -> int:
    """Of dlinfer's ops: each token's queries with as many keys as the longest sequence has."""
    tokens, heads, size = _sizes(given["q"])
    size_v = _sizes(given["attn_output"])[-1]
    longest = given.get("max_kv_seq_len", given.get("max_q_seq_len"))
    keys = example_number(longest)
    if "k" in given and "k_cache" not in given:  # packed keys cannot be more than there are
        keys = min(keys, _sizes(given["k"])[0])
    return 2 * tokens * heads * keys * (size + size_v)


def _experts(given: Given, result: Tensor) -> int:
    """Of the chosen experts alone."""
    tokens, hidden = _sizes(given["hidden_states"])
    intermediate = _sizes(given["down_weights"])[2]
    return 2 * tokens * given["topk"] * 3 * hidden * intermediate


def _packed_experts(given: Given, result: Tensor) -> int:
    """Likewise, of weights [experts, in, words of out]."""
    tokens, hidden = _sizes(given["hidden_states"])
    topk = _sizes(given["topk_ids"])[1]
    return 2 * tokens * topk * 3 * hidden * _sizes(given["down_weights"])[1]


def _experts_in_12_bits(given: Given, result: Tensor) -> int:
    """Likewise, of weights that are bytes."""
    tokens, hidden = _sizes(given["hidden_states"])
    topk = _sizes(given["topk_ids"])[1]
    return 2 * tokens * topk * 3 * hidden * example_number(given["intermediate_size"], unknown=1)


_COUNTS: dict[str, Callable[[Given, Any], int]] = {
    "aten::linear": _linear,
    "dlinfer::linear": _linear,
    "dlinfer::linears": _linears,
    "dlinfer::weight_quant_matmul": _linear,
    "dlinfer::linear_bf12": _linear,
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot"), _product("self")),
    "aten::addmm": _product("mat1"),
    "aten::addmv": _product("mat"),
    "aten::baddbmm": _product("batch1"),
    "aten::einsum": _einsum,
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d"), _convolution),
    **dict.fromkeys(
        ("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d"),
        _transposed_convolution,
    ),
    "aten::convolution": _any_convolution,
    "aten::scaled_dot_product_attention": _attention,
    "dlinfer::fused_moe": _experts,
    "dlinfer::fused_moe_w4a16": _packed_experts,
    "dlinfer::fused_moe_mxfp4": _packed_experts,
    "dlinfer::fused_moe_bf12": _experts_in_12_bits,
}
for _name in (
    "prefill", "paged_prefill", "paged_decode", "quantised_paged_prefill", "quantised_paged_decode",
):  # fmt: skip
    _COUNTS[f"dlinfer::{_name}_attention"] = _packed_attention


def share(inside: int, outside: int) -> float:
    """The part of all that is inside; 1 where there is nothing at all."""
    return inside / (inside + outside) if inside + outside else 1.0
