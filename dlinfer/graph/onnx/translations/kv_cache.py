"""Translate the functional form of ``fill_kv_cache``, which returns the new contents of the paged KV cache."""

import torch

from dlinfer.graph.functional.functional_ops import functional_op
from dlinfer.graph.onnx.translations.index import spread
from dlinfer.graph.onnx.translations.writing import (
    Untranslated,
    Value,
    cache_order,
    op,
    shape_of,
    sizes,
    translates,
)


@translates(functional_op(torch.ops.dlinfer.fill_kv_cache.default))
def fill_kv_cache(
    k: Value, v: Value, k_cache: Value, v_cache: Value, kv_start_indices: Value
) -> tuple[Value, Value]:
    """Return both caches with the rows of k and v in their slots. Rows with a negative slot are ignored.

    The caches' dimensions are in the order that the active vendor uses on the graph's device.
    """
    order = cache_order()
    if order[-1] != "D":
        raise Untranslated(f"the KV cache is laid out as {order}, but the translation writes whole rows only")
    slots = op.Cast(kv_start_indices, to=7)
    used = op.Reshape(op.NonZero(op.GreaterOrEqual(slots, op.Constant(value_int=0))), [-1])
    taken = op.Gather(slots, used)
    block_size = shape_of([(k_cache, order.index("S"))])
    lines = {"B": op.Div(taken, block_size), "S": op.Mod(taken, block_size)}
    new_k, new_v = op.Gather(k, used), op.Gather(v, used)
    if order == "BSHD":
        places = op.Concat(*(op.Unsqueeze(lines[dim], [-1]) for dim in "BS"), axis=-1)
        return op.ScatterND(k_cache, places, new_k), op.ScatterND(v_cache, places, new_v)
    heads = op.Squeeze(shape_of(sizes(k, 1, 2)), [0])
    lines["H"] = op.Range(op.Constant(value_int=0), heads, op.Constant(value_int=1))
    grid = op.Concat(op.Shape(used), shape_of(sizes(k, 1, 2)), axis=0)  # [tokens, heads]
    places = op.Concat(*(spread(lines[dim], int(dim == "H"), 2, grid) for dim in order[:3]), axis=-1)
    return op.ScatterND(k_cache, places, new_k), op.ScatterND(v_cache, places, new_v)
