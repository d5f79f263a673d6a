"""The callees of nodes that are not loops: names of kernels, and the functions that the names stand for.

The functions call a vendor's kernels without torch's dispatcher.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer import ops
from dlinfer.graph.ir import callee
from dlinfer.graph.ir.dialect import arguments, fake, overload, tensors_of
from dlinfer.graph.ir.layout import same_size
from dlinfer.graph.selftest.case import precision_of
from dlinfer.graph.torch_private.inductor import loops_escape
from dlinfer.ops.attention.kv_cache import kv_order
from dlinfer.ops.core.kernels import direct_kernel, kernel_authors
from dlinfer.ops.core.spec import registry
from dlinfer.ops.quantised.bf12 import STRIP
from dlinfer.vendor import KVCacheLayout, discovery
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.four_bit.linears import native_matmul
from dlinfer.vendor.cpu.inductor.aten_calls import ATEN_CALLS
from dlinfer.vendor.cpu.inductor.escaping import LOOPS_ESCAPE
from dlinfer.vendor.cpu.inductor.fusible import CALLS, NATIVE_FLOATS, NORMS, QUANTISING, is_call, is_norm_call
from dlinfer.vendor.cpu.ranks import shares_memory

# The C++ kernels take these over if ``_is_native`` allows it. They read weights in place, without packing or copies.
_NATIVE = {
    "aten::add": "add_whole",
    "aten::add_": "add_whole_",
    **{f"aten::{name}": name for name in "embedding index_copy_ linear scaled_dot_product_attention".split()},
    **{
        f"dlinfer::{name}": name
        for name in (
            "all_reduce",
            *"linear linears linear_bf12 linear_gguf embedding_bf12 weight_quant_matmul".split(),
            *"linear_w8a8 dynamic_quant".split(),
            *"rms_norm_w8a8 add_rms_norm_w8a8 rms_norm add_rms_norm apply_rotary_pos_emb".split(),
            *"silu_and_mul silu_mul gelu_mul fill_kv_cache paged_decode_attention prefill_attention".split(),
            *"paged_prefill_attention moe_gating_topk_softmax fused_moe fused_moe_clamped fused_moe_bf12".split(),
        )
    },
}


def callee_of(node: fx.Node, *, native: bool = True) -> str:
    """Return the callee of a node: the name of its kernel, for ``resolve``. native: whether C++ kernels can be used."""
    op = overload(node)
    if op is None:
        return callee.reference(node.target)
    name = op._schema.name
    if native and name in _NATIVE and _is_native(node):
        kernel = native_matmul() if op is ops.weight_quant_matmul.overload else _NATIVE[name]
        return f"native {kernel}"
    if op.namespace == "dlinfer":
        return "vendor " + name.removeprefix("dlinfer::")
    return callee.reference(op)


def _is_native(node: fx.Node) -> bool:
    op = overload(node)
    if op in NORMS:
        return is_norm_call(node)
    if op in CALLS:
        return is_call(node)
    if op is ops.linear_w8a8.overload:
        values = arguments(node)
        plain = values["quant_dtype"] is torch.int8 and values["out_dtype"] in NATIVE_FLOATS
        return plain and fake(values["rms_scale"]).dtype is torch.float32
    if op is ops.weight_quant_matmul.overload:
        values = arguments(node)
        floats = (values["x"], values["scales"], values["bias"])
        return all(fake(item).dtype in NATIVE_FLOATS for item in floats if item is not None)
    if op in QUANTISING:
        return fake(arguments(node)["x"]).dtype in NATIVE_FLOATS
    if op is not None and op in _IF_PLAIN:
        return _is_ours(op._schema.name.removeprefix("dlinfer::")) and _IF_PLAIN[op](node)
    return op is None or op.namespace != "aten" or (op in ATEN_CALLS and ATEN_CALLS[op](node))


# Ops that compute in the dtype of their first argument, whatever the dtype of scales or of the router's weights.
_OF_THE_FIRST = (ops.weight_quant_matmul.overload, ops.fused_moe.overload, ops.fused_moe_clamped.overload)


def precision_of_call(node: fx.Node) -> str:
    """Return the precision that a node's C++ kernel computes in, as the self-test names it."""
    if overload(node) in _OF_THE_FIRST:
        return precision_of([fake(next(iter(arguments(node).values())))])
    return precision_of([tensor for near in (node, *node.all_input_nodes) for tensor in tensors_of(near)])


def _is_ours(name: str) -> bool:
    """Return whether this vendor's own kernel serves an op on CPU.

    Another vendor may be active with kernels of its own, which may expect another cache layout.
    """
    vendor = discovery.activate_default("cpu")
    return vendor is not None and kernel_authors(vendor).get(name) == "cpu"


def _has_own_layout() -> bool:
    """Return whether KV caches have this vendor's layout.

    Another vendor may use this vendor's kernels, and give them views of caches in its own layout.
    """
    return kv_order("cpu") == KVCacheLayout.order


def _is_plain_fill(node: fx.Node) -> bool:
    return _has_own_layout() and fake(arguments(node)["k"]).dtype in NATIVE_FLOATS


def _is_plain_mixture(node: fx.Node) -> bool:
    """Return whether the C++ kernel takes the arguments of a call of an op for mixture of experts.

    All arguments must be positional. The first one (the router's logits, or the hidden states) must have a dtype that
    the C++ kernels take.
    """
    return not node.kwargs and fake(node.args[0]).dtype in NATIVE_FLOATS  # pyright: ignore[reportArgumentType]


def _is_packed_mixture(node: fx.Node) -> bool:
    values = arguments(node)
    hidden = fake(values["hidden_states"])
    sizes = (hidden.shape[1], values["intermediate_size"])
    return hidden.dtype is torch.bfloat16 and all(
        isinstance(size, int) and size % STRIP == 0 for size in sizes
    )


def _is_plain_paged(node: fx.Node) -> bool:
    return _has_own_layout() and _is_plain_attention(node, "k_cache", "v_cache")


def _is_plain_attention(node: fx.Node, keys: str, values: str) -> bool:
    """Return whether the C++ kernel can read an attention call's tensors as they are.

    If not, the vendor's Python function copies them. The C++ kernel takes the op's arguments by position, so the node
    may pass none by name.
    keys, values: the names of the op's arguments for keys and values."""
    if node.kwargs:
        return False
    fakes = map_arg(arguments(node), fake)
    read = [fakes[name] for name in ("q", keys, values, "attn_output")]
    tables = [fakes[name] for name in ("alibi_slopes", "sinks") if fakes.get(name) is not None]
    return (
        len({tensor.dtype for tensor in read}) == 1
        and read[0].dtype in NATIVE_FLOATS
        and all(same_size(tensor.stride(-1), 1) for tensor in read)
        and all(table.dtype is torch.float32 for table in tables)
    )


_PLACES = (torch.int64, torch.int32)

# Ops that reach the C++ kernel only through this vendor's function -> whether a call does.
_IF_PLAIN: dict[Any, Callable[[fx.Node], bool]] = {
    ops.all_reduce.overload: lambda node: shares_memory(arguments(node)["group"]),
    ops.fill_kv_cache.overload: _is_plain_fill,
    ops.paged_decode_attention.overload: _is_plain_paged,
    ops.paged_prefill_attention.overload: _is_plain_paged,
    ops.prefill_attention.overload: lambda node: _is_plain_attention(node, "k", "v"),
    ops.linear_bf12.overload: lambda node: fake(arguments(node)["x"]).dtype is torch.bfloat16,
    ops.linear_gguf.overload: lambda node: fake(arguments(node)["x"]).dtype in NATIVE_FLOATS,
    ops.fused_moe_bf12.overload: _is_packed_mixture,
    ops.embedding_bf12.overload: lambda node: fake(arguments(node)["indices"]).dtype in _PLACES,
    ops.moe_gating_topk_softmax.overload: _is_plain_mixture,
    ops.fused_moe.overload: _is_plain_mixture,
    ops.fused_moe_clamped.overload: _is_plain_mixture,
}


def resolve(reference: str) -> Callable[..., Any]:
    """Return the function that a callee stands for. reference: the callee, a name from ``callee_of``."""
    kind, _, name = reference.partition(" ")
    if kind == "native":
        return _native(name)
    if kind == LOOPS_ESCAPE:
        return loops_escape
    if kind == "vendor":
        return direct_kernel(name, "cpu")
    return callee.resolve(reference)


def _native(name: str) -> Callable[..., Any]:
    reason = native.why_not()
    if reason is not None:
        raise KeyError(f"native {name}: {reason}")
    kernel = getattr(torch.ops.dlinfer_cpu, name).default
    places = places_of(name)
    if places is None:
        return kernel

    def chosen(*args: Any) -> Any:
        return kernel(*(args[place] for place in places))

    return chosen


@functools.cache
def places_of(name: str) -> tuple[int, ...] | None:
    """Return the indices of an op's arguments that its C++ kernel takes; None if it takes all of them in their order.

    For example, the kernel takes no block size, since the cache's shape has it. name: the name of op and kernel."""
    spec = registry().get(name)
    if spec is None:
        return None
    names = [argument.name for argument in spec.overload._schema.arguments]
    taken = [argument.name for argument in getattr(torch.ops.dlinfer_cpu, name).default._schema.arguments]
    return None if names == taken or not set(taken) <= set(names) else tuple(map(names.index, taken))
