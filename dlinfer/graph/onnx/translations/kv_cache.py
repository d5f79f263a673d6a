"""The paged KV cache written as a value: the functional twin of ``fill_kv_cache``."""

from typing import Any

import torch

from dlinfer.graph.onnx.translations.writing import opset, shape_of


def table() -> dict[Any, Any]:
    """Translations by op."""
    from dlinfer.graph.functional.variants import twin_op

    return {twin_op(torch.ops.dlinfer.fill_kv_cache.default): fill_kv_cache}


def fill_kv_cache(k: Any, v: Any, k_cache: Any, v_cache: Any, kv_start_indices: Any) -> tuple[Any, Any]:
    """Rows of k and v in their slots of the caches [blocks, block_size, heads, size]; negative slots are left out."""
    op = opset()
    slots = op.Cast(kv_start_indices, to=7)
    used = op.Reshape(op.NonZero(op.GreaterOrEqual(slots, op.Constant(value_int=0))), [-1])
    taken = op.Gather(slots, used)
    block_size = shape_of([(k_cache, 1)])
    block, offset = op.Div(taken, block_size), op.Mod(taken, block_size)
    places = op.Concat(op.Unsqueeze(block, [-1]), op.Unsqueeze(offset, [-1]), axis=-1)
    return (
        op.ScatterND(k_cache, places, op.Gather(k, used)),
        op.ScatterND(v_cache, places, op.Gather(v, used)),
    )
