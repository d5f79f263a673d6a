"""Merge a cache write and paged attention into one node, for engines whose attention writes the cache itself.

Attention of such an engine takes the blocks of each sequence, but no slots: it writes the new tokens right behind the
old ones. So a cache write may merge with the attention only if the write's slots are exactly these places. That depends
on values at run time. The merged graph assumes it, and the op ``check_slots`` checks it at each run."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import (
    arguments,
    fake,
    is_compute,
    memory_read,
    model_line,
    op_name,
    storages,
    written_arguments,
)
from dlinfer.graph.ir.effects import Effects, Memory, effects_of
from dlinfer.graph.ir.own_ops import own_op
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, Rewriter
from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.vendor.openvino.passes.slot_check import CHECK_SLOTS


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_start_indices: Tensor,
    block_offsets: Tensor,
    block_size: int,
    q_ends: Tensor | None,
    kv_seqlens: Tensor,
    max_q_seq_len: int,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    softmax_scale: float,
    window_left: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Run ``dlinfer.fill_kv_cache`` of k and v, then causal paged attention of q over the caches.

    Takes the arguments of both ops.
    q_ends: the index after each sequence's last query in q; None for one new token per sequence.

    Mutates k_cache, v_cache and attn_output; attn_output may be q's memory.
    """
    ops.fill_kv_cache.overload(k, v, k_cache, v_cache, kv_start_indices)
    pages = (q, k_cache, v_cache, block_offsets, block_size)
    heads = (num_q_heads, num_kv_heads, attn_output, softmax_scale)
    extras = (logit_softcapping, alibi_slopes, sinks)
    if q_ends is None:
        ops.paged_decode_attention.overload(*pages, kv_seqlens, max_kv_seq_len, *heads, window_left, *extras)
        return
    ops.paged_prefill_attention.overload(
        *pages, q_ends, kv_seqlens, max_q_seq_len, max_kv_seq_len, *heads, True, window_left, -1, *extras
    )


CACHED_ATTENTION = own_op(cached_attention, cached_attention, mutates=("k_cache", "v_cache", "attn_output"))


# --- the pass


def merge_cached_attention(graph_module: fx.GraphModule) -> list[Edit]:
    """Merge each ``fill_kv_cache`` with the attention that reads the caches after it. Return one edit for each pair."""
    rewriter = Rewriter(graph_module)
    effects = effects_of(graph_module.graph)
    merged = []
    for attention in list(graph_module.graph.nodes):
        operands = _arguments_of(attention)
        fill = _fill_of(attention, effects) if operands is not None else None
        if operands is None or fill is None:
            continue
        named = arguments(fill) | operands
        new = rewriter.call(attention, CACHED_ATTENTION, *(named[name] for name in _PARAMETERS))
        graph_module.graph.erase_node(fill)
        rewriter.edits.append(_edit(fill, attention, new))
        graph_module.graph.erase_node(attention)
        merged.append(new)
    _insert_checks(rewriter, merged)
    return rewriter.edits


_PARAMETERS = tuple(parameter.name for parameter in CACHED_ATTENTION._schema.arguments)


def _edit(fill: fx.Node, attention: fx.Node, new: fx.Node) -> Edit:
    return Edit("cache write and attention", (fill.name, attention.name), (new.name,), model_line(attention))


def _arguments_of(attention: fx.Node) -> dict[str, Any] | None:
    """Return a causal paged attention's arguments, named as in the merged op; None for any other node."""
    if attention.target == ops.paged_decode_attention.overload:
        return arguments(attention) | {"q_ends": None, "max_q_seq_len": 1}
    if attention.target == ops.paged_prefill_attention.overload and arguments(attention)["causal"]:
        return arguments(attention)
    return None


def _fill_of(attention: fx.Node, effects: Effects) -> fx.Node | None:
    """Return the cache write that an attention can merge with; None if there is none.

    It is the last write before the attention, and to the same caches. Between the two no node may read the caches or
    write anything. The caches must be inputs, since an engine writes them in place."""
    caches = [arguments(attention)[name] for name in ("k_cache", "v_cache")]
    if any(cache.op != "placeholder" for cache in caches) or storages(caches[0]) & storages(caches[1]):
        return None
    memory = effects.shared_with(frozenset(memory for cache in caches for memory in storages(cache)))
    for node in _before(attention):
        if node.target == ops.fill_kv_cache.overload:
            same = [arguments(node)[name] for name in ("k_cache", "v_cache")] == caches
            return node if same else None
        # The write moves after this node, so the node must neither read the caches nor write anything.
        if written_arguments(node) or _reads(node) & memory:
            return None
    return None


_MADE_LIKE = frozenset(f"aten.{name}" for name in ("new_empty", "empty_like", "new_zeros", "zeros_like"))
"""Ops that read a tensor's sizes and dtype, but not its values. They allocate an attention's output, for example."""


def _reads(node: fx.Node) -> Memory:
    """Return the memory whose values a node reads."""
    if not is_compute(node) or op_name(node) in _MADE_LIKE:
        return frozenset()
    return memory_read(node)


def _before(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls before a node, the nearest first, back to the inputs."""
    while (node := node.prev).op in ("call_function", "get_attr"):
        if node.op == "call_function":
            yield node


def _insert_checks(rewriter: Rewriter, merged: list[fx.Node]) -> None:
    """Insert a check of the slots before the merged nodes. Nodes with the same slots and tables share one check."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in merged:
        named = arguments(node)
        key = tuple(named[name] for name in _CHECKED)
        groups.setdefault(key, []).append(node)
    for key, nodes in groups.items():
        caches = {
            str(canonical(fake(arguments(n)["k_cache"])).shape[0]): arguments(n)["k_cache"] for n in nodes
        }
        rewriter.call(nodes[0], CHECK_SLOTS, *key, list(caches.values()))


_CHECKED = ("kv_start_indices", "block_offsets", "block_size", "q_ends", "kv_seqlens")


def cached_attention_pass(engine: str) -> Pass:
    """Return the pass that merges cache writes and attention. engine: the name of the engine that runs it."""
    return Pass(
        f"{engine}.cached_attention",
        "the engine's attention writes the cache itself, and a separate write would need a copy",
        merge_cached_attention,
        stands_for=_stands_for,
    )


def _stands_for(node: fx.Node) -> tuple[Any, ...] | None:
    if node.target != CACHED_ATTENTION:
        return None
    decodes = arguments(node)["q_ends"] is None
    attention = ops.paged_decode_attention if decodes else ops.paged_prefill_attention
    return ops.fill_kv_cache.overload, attention.overload
