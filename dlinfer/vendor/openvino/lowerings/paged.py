"""Attention over a paged KV cache by OpenVINO's own op, which reads and writes the cache in place.

The op takes 28 inputs: the new tokens, the caches, each sequence's start and blocks, and a dozen features that stay
off. It writes new keys and values into the memory of the cache parameters. If a sequence has several queries, the op
also zeroes the values behind the sequence's end in its last block. These values are never read.
"""

import weakref
from typing import Any, NamedTuple

import openvino as ov
import openvino.op
import openvino.opset16 as op
import torch
from openvino import Output
from openvino.op import Constant, Parameter
from torch import Tensor

from dlinfer.graph.functional.functional_ops import functional_op
from dlinfer.graph.torch_private.symbols import example_number, fixed_size
from dlinfer.vendor import discovery
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.devices import has_bfloat16
from dlinfer.vendor.openvino.layout import LAYOUT
from dlinfer.vendor.openvino.lowerings.slicing import FURTHEST, cut
from dlinfer.vendor.openvino.passes.cached_attention import CACHED_ATTENTION
from dlinfer.vendor.openvino.registry import Call, lowers
from dlinfer.vendor.openvino.written import InPlace

PagedAttention: Any = vars(openvino.op)["_PagedAttentionExtension"]  # missing in the package's stubs
I32, F32 = ov.Type.i32, ov.Type.f32


class Pages(NamedTuple):
    """Where each sequence starts and ends, as OpenVINO's attention takes it; shared by a model's layers.

    past: how many tokens of each sequence are cached already.
    begins: the index of each sequence's first new token, and at the end the number of all new tokens.
    blocks: the block table, flattened.
    block_begins: the index of each sequence's first block in ``blocks``, and at the end their number.
    longest: the largest length of a sequence."""

    past: Output
    begins: Output
    blocks: Output
    block_begins: Output
    longest: Output


def _refusal(call: Call) -> str | None:
    if (reason := foreign_layout()) is not None:
        return reason
    if (block_size := example_number(call.fake("k_cache").shape[2])) != LAYOUT.block_size:
        return f"blocks have {block_size} slots, but OpenVINO's attention takes {LAYOUT.block_size}"
    if call.fake("k_cache").dtype is torch.bfloat16 and not has_bfloat16():
        return (
            "this CPU has no bfloat16: OpenVINO computes in float32, and the KV cache cannot stay in bfloat16"
        )
    if any(call.is_node(name) for name in ("softmax_scale", "window_left", "logit_softcapping")):
        return "scale, window or soft cap are not fixed numbers"
    if call.arguments["logit_softcapping"]:
        return "OpenVINO's attention does not support a soft cap on scores"
    return next(filter(None, (_settle(call.fake(name)) for name in ("q", "k_cache", "v_cache"))), None)


def foreign_layout() -> str | None:
    """Return a reason if KV caches have another layout than OpenVINO's attention needs; else None."""
    vendor = discovery.activate_default("cpu")
    if vendor is not None and vendor.kv_cache_layout == LAYOUT:
        return None
    name = vendor.name if vendor is not None else "none"
    return (
        f"the KV cache is laid out for vendor {name!r}, but this engine needs the layout of vendor 'openvino'"
    )


def _settle(x: Tensor) -> str | None:
    """Add guards on all sizes of x but the first, because the model is built for these sizes.

    Return a reason if one of the sizes is not known; else None.
    """
    for size in x.shape[1:]:
        if not example_number(size) or size != example_number(size):
            return "heads, head sizes or block size are known only at run time"
    return None


def _sizes(x: Tensor) -> list[int]:
    """Return all sizes of x but the first. ``_settle`` has added guards on them."""
    return [size for symbol in x.shape[1:] if (size := fixed_size(symbol)) is not None]


@lowers(functional_op(CACHED_ATTENTION), refuses=_refusal, takes_rows=True)
def cached_attention(
    b: Builder,
    q: Output,
    k: Output,
    v: Output,
    k_cache: Output,
    v_cache: Output,
    *,
    block_offsets: Output,
    q_ends: Output | None,
    kv_seqlens: Output,
    softmax_scale: float,
    window_left: int,
    alibi_slopes: Output | None,
    sinks: Output | None,
) -> list[Any]:
    heads, _ = _sizes(b.call.fake("q"))
    kv_heads, _, size = _sizes(b.call.fake("k_cache"))
    *_, size_v = _sizes(b.call.fake("v_cache"))
    pages = _pages(b, block_offsets, q_ends, kv_seqlens)
    node = PagedAttention(
        [
            _flat(b, q, heads * size),
            _flat(b, k, kv_heads * size),
            _flat(b, v, kv_heads * size_v),
            _cache_input(k_cache),
            _cache_input(v_cache),
            pages.past,
            pages.begins,
            pages.blocks,
            pages.block_begins,
            b.scalar(softmax_scale, F32),
            b.scalar(window_left + 1, I32),  # counts the query's own key; 0 is no window
            _none(F32) if alibi_slopes is None else b.cast(alibi_slopes, F32),
            pages.longest,
            _none(I32),  # score_aggregation_window
            _none(I32),  # rotated_block_indices
            _none(I32),  # rotation_deltas
            _none(F32),  # rotation_trig_lut
            _none(F32),  # xattention_threshold
            b.scalar(0, I32),  # xattention_block_size
            b.scalar(0, I32),  # xattention_stride
            _none(F32) if sinks is None else _per_head(b, sinks),
            b.scalar(0, I32),  # adaptive_rkv_start_size
            _none(I32),  # adaptive_rkv_evictable_sizes
            _none(I32),  # adaptive_rkv_diversity_block_set_indices
            _none(I32),  # adaptive_rkv_diversity_block_set_indices_begins
            _none(I32),  # token_type_ids
            _none(ov.Type.u8),  # qq_bias
            _none(I32),  # qq_bias_begins
        ]
    )
    head_sizes = {
        "k_head_size": size,
        "num_k_heads": kv_heads,
        "v_head_size": size_v,
        "num_v_heads": kv_heads,
    }
    for key, number in head_sizes.items():
        node.get_rt_info()[key] = number
    out = op.reshape(node.output(0), b.axes([0, heads, size_v]), True).output(0)
    return [InPlace(k_cache), InPlace(v_cache), out]


def _flat(b: Builder, x: Output, row: int) -> Output:
    return op.reshape(x, b.axes([0, row]), True).output(0)


def _cache_input(cache: Output) -> Output:
    """Let the plugin choose the type of a cache's parameter.

    With a fixed type other than its own choice, the plugin would write into a copy.
    """
    parameter = cache.get_node()
    assert isinstance(parameter, Parameter), "caches are inputs"
    parameter.set_element_type(ov.Type.dynamic)
    parameter.validate_and_infer_types()
    return cache


def _none(kind: ov.Type) -> Output:
    return Constant(kind, ov.Shape([0]), []).output(0)


def _per_head(b: Builder, values: Output) -> Output:
    return op.reshape(b.cast(values, F32), b.axes([1, -1, 1, 1]), False).output(0)


# --- pages

_made: "weakref.WeakKeyDictionary[Builder, dict[Any, Pages]]" = weakref.WeakKeyDictionary()


def _pages(b: Builder, table: Output, ends: Output | None, lengths: Output) -> Pages:
    known = _made.setdefault(b, {})
    key = tuple(b.call.arguments[name] for name in ("block_offsets", "q_ends", "kv_seqlens"))
    if key not in known:
        known[key] = _new_pages(b, table, ends, lengths)
    return known[key]


def _new_pages(b: Builder, table: Output, ends: Output | None, lengths: Output) -> Pages:
    table, lengths = b.cast(table, I32), b.cast(lengths, I32)
    shape = op.shape_of(table, "i32")
    zero, unit = b.scalar(0, I32), b.scalar(1, I32)
    sequences, width = (op.gather(shape, b.scalar(dim, I32), zero) for dim in (0, 1))
    order = op.range(zero, op.add(sequences, unit), unit, "i32").output(0)
    begins = order
    if ends is not None:
        begins = op.concat([Constant(I32, ov.Shape([1]), [0]), b.cast(ends, I32)], 0).output(0)
    new = op.subtract(cut(b, begins, 0, 1, FURTHEST), cut(b, begins, 0, 0, -1))
    return Pages(
        op.subtract(lengths, new).output(0),
        begins,
        op.reshape(table, b.axes([-1]), False).output(0),
        # Whole rows of the table: blocks after a sequence's end are not read.
        op.multiply(order, width).output(0),
        op.reduce_max(lengths, b.axes([0]), False).output(0),
    )
