"""Linear layers with packed 4-bit weights, computed by ONNX Runtime's op MatMulNBits.

MatMulNBits takes a weight with one row for each output, in blocks whose size is a power of two. AWQ's layout differs,
so a weight is repacked once and built into the session. If the weight were an input instead, MatMulNBits would convert
it to float at each call. For 2048 x 5632 and one token this takes 34 ms instead of 0.4, measured with AVX-512.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from dlinfer.graph.ir.dialect import STATIC, arguments, fake
from dlinfer.graph.onnx.translations.writing import op
from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.ops.quantised.packing import AWQ, Packing
from dlinfer.vendor.onnxruntime.translations import contrib_ops

OP = torch.ops.dlinfer.weight_quant_matmul.default

_NIBBLES = Packing(bits=4, along="in", order=(0, 1), storage=torch.uint8)
_BLOCKS = (256, 128, 64, 32, 16)  # MatMulNBits does not widen the whole weight for these
_PARTS = ("qweight", "scales", "offset")
_FLOAT, _TYPES = 1, {torch.float32: 1, torch.float16: 10}  # of ONNX's TensorProto


def refusal(node: fx.Node) -> str | None:
    """Return a reason not to run a ``weight_quant_matmul`` node in ONNX Runtime; None if MatMulNBits can compute it."""
    call = arguments(node)
    parts = [call[name] for name in _PARTS if call[name] is not None]
    if not all(part.op == "placeholder" and part.meta.get(STATIC) for part in parts):
        return "the packed weight is computed, or passed at each call"
    sizes = [size for part in parts for size in fake(part).shape]
    if any(not fixed_size(size) for size in sizes):
        return "the packed weight has a size that is not fixed, or is without elements"
    if _block(call) is None:
        return f"the group size {call['group_size']} of the packed weight is not a multiple of 16"
    return None


def split_packed(graph: fx.Graph, weights: Collection[fx.Node], accuracy_level: int) -> None:
    """Replace ``weight_quant_matmul`` in the graph by ``product`` if its packed weight is among ``weights``.

    Changes the graph in place. accuracy_level: see ``OrtOptions``.
    """
    for node in graph.find_nodes(op="call_function", target=OP):
        call = arguments(node)
        if not all(call[name] in weights for name in _PARTS if call[name] is not None):
            continue
        qweight, scales, offset = (call[name] for name in _PARTS)
        block, size, features = _block(call), fake(qweight).shape[0], fake(scales).shape[1]
        if block is None:
            continue
        blocks, group = -(-size // block), call["group_size"] or size
        with graph.inserting_before(node):
            numbers = _prepared(graph, words, (qweight, block), (features, blocks, block // 2), torch.uint8)
            wide = _prepared(
                graph, block_scales, (scales, block, group, blocks), (features, blocks), torch.float32
            )
            zeros = None
            if offset is not None:
                half = (features, (blocks + 1) // 2)
                zeros = _prepared(graph, block_zeros, (offset, block, group, blocks), half, torch.uint8)
            args = (call["x"], numbers, wide, zeros, call["bias"], size, features, block, accuracy_level)
            new = graph.call_function(product, args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def packed_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Return the graph's inputs that are parts of packed weights."""
    calls = [arguments(node) for node in graph.find_nodes(op="call_function", target=OP)]
    return {call[name] for call in calls for name in _PARTS if call[name] is not None}


def _block(call: Any) -> int | None:
    """Return the largest block size that divides the group size and makes MatMulNBits fast; None if there is none.

    call: the arguments of ``weight_quant_matmul`` by name.
    """
    size, group = fixed_size(fake(call["qweight"]).shape[0]) or 0, call["group_size"]
    if 0 < group < size:
        return next((block for block in _BLOCKS if group % block == 0), None)
    return next(block for block in _BLOCKS if block <= max(size, 16))


def _prepared(graph: fx.Graph, make: Any, args: Any, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
    node = graph.call_function(make, args)
    node.meta = {"val": fake(args[0]).new_empty(shape, dtype=dtype)}
    return node


# --- the parts of a weight, made once


def words(qweight: Tensor, block: int) -> Tensor:
    """Repack AWQ's weight [in, out / 8] as uint8 [out, blocks, block / 2].

    Each byte has two numbers, the first one low.
    """
    missing = -qweight.shape[0] % block
    whole = functional.pad(qweight, (0, 0, 0, missing)) if missing else qweight
    return AWQ.repack(whole, _NIBBLES).t().unflatten(1, (-1, block // 2)).contiguous()


def block_scales(scales: Tensor, block: int, group: int, blocks: int) -> Tensor:
    """Convert scales [groups, out] to float32 [out, blocks]: a block takes the scale of its group."""
    return scales[_groups(block, group, blocks)].t().float().contiguous()


def block_zeros(offset: Tensor, block: int, group: int, blocks: int) -> Tensor:
    """Repack AWQ's zero points [groups, out / 8] as uint8 [out, blocks / 2 rounded up]. Each byte has two."""
    zeros = AWQ.unpack_zeros(offset)[_groups(block, group, blocks)]
    return _NIBBLES.pack(functional.pad(zeros, (0, 0, 0, blocks % 2))).t().contiguous()


def _groups(block: int, group: int, blocks: int) -> Tensor:
    return torch.arange(blocks) * block // group


PREPARED = frozenset({words, block_scales, block_zeros})
"""The functions that repack a weight. Each runs once, before the weight is built into the session."""


# --- in ONNX


def product(
    x: Any,
    numbers: Any,
    scales: Any,
    zeros: Any,
    bias: Any,
    in_features: int,
    out_features: int,
    block: int,
    accuracy_level: int,
) -> Any:
    """Write the layer in ONNX. It is computed in float32 and rounded to ``x``'s dtype at the end.

    accuracy_level: how MatMulNBits may also round ``x``, see ``OrtOptions``.
    """
    wide = op.Cast(x, to=_FLOAT)
    result = contrib_ops.mat_mul_n_bits(
        wide, numbers, scales, zeros, in_features, out_features, block, accuracy_level
    )
    if bias is not None:
        result = op.Add(result, op.Cast(bias, to=_FLOAT))
    return op.CastLike(result, x)
