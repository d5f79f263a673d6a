"""Decide which nodes inductor compiles into loops, so that neighbouring nodes fuse.

Each node is decomposed as inductor would do it. A node becomes loops if inductor has a loop for each op of the node's
decomposition. Otherwise it is a library call (matmul, attention, sort), which gains nothing from fusion."""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dlinfer import ops
from dlinfer.graph.ir.dialect import Bare, arguments, fake, is_compute, overload, tensors_of
from dlinfer.graph.torch_private import fake_mode, inductor, symbols
from dlinfer.ops.core.spec import registry
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor.twins import twins_of

_LIBRARY_CALLS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "sort", "topk", "cumsum", "cumprod", "logcumsumexp",
    "_embedding_bag", "_fft_c2c", "_fft_r2c", "_fft_c2r", "mkldnn_rnn_layer",
)  # fmt: skip

# A compiled loop checks indices too, but in a thread of its own, where a wrong index ends the process. ATen raises.
_INDEXED_BY_DATA = (
    "index", "embedding", "gather", "index_put", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy",
    "index_fill", "index_select", "take", "put",
)  # fmt: skip

_DIVISIONS = ("div", "floor_divide", "fmod", "remainder")

# A norm's scale depends on a sum. Loops sum in another order than torch, which changes the last digit. A scaled value
# halfway between two 16-bit numbers then moves by a whole step. So in 16 bits norms are calls of kernels with torch's
# order. In float32 they are calls if there is a C++ kernel, because loops would end a chain.
NORMS = (ops.rms_norm.overload, ops.add_rms_norm.overload)

# Rotation and gated activation stand between two products, or between a product and a cache: only views can fuse with
# them. Python calls inductor's loops, which takes longer than the work of a decode step.
CALLS = tuple(op.overload for op in (ops.apply_rotary_pos_emb, ops.silu_and_mul, ops.silu_mul, ops.gelu_mul))

# These ops return 8-bit numbers. Loops might sum a norm in another order; a value halfway between two numbers would
# then round to the other one. The kernels also do it in one pass.
QUANTISING = (ops.dynamic_quant.overload, ops.rms_norm_w8a8.overload, ops.add_rms_norm_w8a8.overload)

# For floats, loops compute these less precisely than torch's kernels (exp(x) - 1 for expm1, a polynomial for erf),
# treat infinities differently, or overflow where the result does not. The loops of gelu and the norms are right.
_OTHER_NUMBERS = frozenset(
    "acosh arccosh atanh arctanh erf special_erf expm1 special_expm1 elu celu selu remainder floor_divide nextafter"
    " lerp addcdiv var std var_mean std_mean".split()
)

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NATIVE_FLOATS = frozenset((torch.bfloat16, torch.float16, torch.float32))
"""The floating dtypes that the C++ kernels compute in."""
_DTYPES = frozenset((*_FLOATS, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))

_answers: dict[str, int] = {}


def loops_of(node: fx.Node) -> int:
    """Return the number of elementary loops that inductor makes of a pure node; 0 if the node must stay a call."""
    op = overload(node)
    if op is None or op in QUANTISING or is_norm_call(node) or is_call(node):
        return 0
    reads = [tensor for parent in node.all_input_nodes for tensor in tensors_of(parent)]
    results = tensors_of(node)
    if not results or any(tensor.dtype not in _DTYPES for tensor in [*reads, *results]):
        return 0
    if any(tensor.device.type != "cpu" for tensor in [*reads, *results]):
        return 0
    if any(tensor.is_floating_point() for tensor in results) and _gives_other_numbers(op, node):
        return 0
    if _counts_all_elements(op, node):
        return 0
    if any(_is_data(fake(parent)) for parent in node.all_input_nodes):
        return 0
    if torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags:
        return 0
    key = _key(node)
    if key not in _answers:
        _answers[key] = _count_loops(node)
    return _answers[key]


def is_norm_call(node: fx.Node) -> bool:
    """Return whether a node is a norm that a kernel computes, not a loop."""
    if overload(node) not in NORMS:
        return False
    dtype = tensors_of(node)[0].dtype
    return dtype in (torch.bfloat16, torch.float16) or (dtype is torch.float32 and native.why_not() is None)


def is_call(node: fx.Node) -> bool:
    """Return whether a node is a rotation or gated activation that a C++ kernel computes."""
    if overload(node) not in CALLS or native.why_not() is not None:
        return False
    if overload(node) is ops.gelu_mul.overload and arguments(node)["tanh"] is not True:
        return False  # the exact gelu uses torch's error function
    dtypes = {tensor.dtype for parent in node.all_input_nodes for tensor in tensors_of(parent)}
    return len(dtypes) == 1 and dtypes <= NATIVE_FLOATS


def _gives_other_numbers(op: torch._ops.OpOverload, node: fx.Node) -> bool:
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    return name in _OTHER_NUMBERS or (name == "div" and node.kwargs.get("rounding_mode") == "floor")


def _counts_all_elements(op: torch._ops.OpOverload, node: fx.Node) -> bool:
    """Return whether a node is an argmax or argmin over all dimensions.

    Loops would number the elements in memory order, which is not torch's order for every layout.
    """
    name = op._schema.name.removeprefix("aten::")
    return name in ("argmax", "argmin") and arguments(node)["dim"] is None


def _is_data(value: Any) -> bool:
    """Return whether a symbolic float or bool depends on a tensor's values.

    Loops take only numbers that depend on sizes.
    """
    return isinstance(value, (torch.SymFloat, torch.SymBool)) and bool(symbols.free_unbacked_symbols(value))


def _key(node: fx.Node) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
        return repr(value)

    args, kwargs = map_arg((node.args, node.kwargs), lambda parent: Bare(shown(fake(parent))))
    # The names of symbols mean other sizes in another graph.
    ranges = symbols.symbol_ranges([fake(parent) for parent in node.all_input_nodes])
    return f"{node.target}{args}{kwargs}{sorted(ranges.items())}"


def decompositions() -> dict[Any, Any]:
    """Return inductor's decompositions. Those of dlinfer's pure ops are the ops' reference implementations."""
    ours = {spec.overload: spec.reference for spec in registry().values() if not spec.mutates}
    return inductor.decompositions() | ours


def _count_loops(node: fx.Node) -> int:
    values: list[Any] = []

    def hole(parent: fx.Node) -> Any:
        values.append(_example(fake(parent)))
        return _Hole(len(values) - 1)

    places = map_arg((node.args, node.kwargs), hole)

    def call(*results: Any) -> Any:
        args, kwargs = _filled(places, results)
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    # The node is traced with fresh symbols, so that decomposing adds no guards to the model's sizes. Such guards would
    # depend on the models that were compiled before.
    fresh = twins_of(values)
    try:
        graph = fake_mode.trace_decomposed(call, fresh.values, fresh.mode, decompositions())
    except Exception:  # noqa: BLE001 - what cannot be decomposed here is called as it is: that is the answer
        return 0
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    if not all(_is_loop(n) for n in calls):
        return 0
    return max(1, sum(is_compute(n) for n in calls))


def _example(value: Any) -> Any:
    """Return a value to trace with: for a symbolic float or bool its number at capture, else the value itself."""
    return value.node.hint if isinstance(value, (torch.SymFloat, torch.SymBool)) else value


class _Hole:
    """Stands for an argument of a node that is another node's result. index: its number among such arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


def _may_divide_integers_by_zero(node: fx.Node) -> bool:
    """Return whether a node divides integers by something other than a constant, which may be 0.

    At 0, code of torch 2.12's inductor ends the process. That of later releases does where it rounds towards 0.
    """
    divisor = node.args[1] if len(node.args) > 1 else node.kwargs.get("other")
    is_constant = isinstance(divisor, (int, float)) and divisor != 0
    return not is_constant and not fake(node).is_floating_point()


def _filled(places: Any, results: Any) -> Any:
    return pytree.tree_map(lambda leaf: results[leaf.index] if isinstance(leaf, _Hole) else leaf, places)


def _is_loop(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # arithmetic on sizes
    if inductor.calls_library(target):
        return False
    name = target._schema.name.split("::")[1]
    if name.rstrip("_") in _DIVISIONS and _may_divide_integers_by_zero(node):
        return False
    return target.namespace in ("aten", "prims") and name not in (*_LIBRARY_CALLS, *_INDEXED_BY_DATA)
