"""Copies of faults that dlinfer once had, put into a worker process to see that the fuzzer finds them.

Each stands here whole, so that it stays what it was when the code that it replaces is mended.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "FUZZ_PLANT"
"""Environment variable of a worker: the name of a fault."""

aten = torch.ops.aten


def _everywhere(old: Any, new: Any) -> None:
    """Replace a function in every module that imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("dlinfer"):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


def _lowers(target: Any, build: Callable[..., Any]) -> None:
    """Replace OpenVINO's lowering of an op, and whatever it refuses."""
    from dlinfer.vendor.openvino import engine, registry

    del engine  # importing it fills the table
    registry._table[target] = dataclasses.replace(
        registry._table[target], build=build, refuses=lambda call: None
    )


def attention_layout() -> None:
    """inductor: attention's results are taken to lie as its fake says, whichever backend ran."""
    from dlinfer.graph.ir import effects
    from dlinfer.vendor.cpu.inductor import engine

    del engine  # importing it brings every module that asks for layouts
    sound = effects.layout_to_keep

    def layout_to_keep(node: Any) -> Any:
        if node.target is aten.scaled_dot_product_attention.default:
            return None
        return sound(node)

    _everywhere(sound, layout_to_keep)


def cache_layout() -> None:
    """Every engine: a compiled graph keeps the cache layout of the vendor that was active when it was traced."""
    from dlinfer.ops.attention import kv_cache
    from dlinfer.vendor import KVCacheLayout, discovery

    def order(device_type: str) -> str:
        vendor = discovery.active(device_type) or discovery.default(device_type)
        return KVCacheLayout.order if vendor is None else vendor.kv_cache_layout.order

    order._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def canonical(cache: torch.Tensor) -> torch.Tensor:
        found = order(cache.device.type)
        return cache if found == KVCacheLayout.order else KVCacheLayout(found).canonical(cache)

    import dlinfer.ops

    del dlinfer
    _everywhere(kv_cache.canonical, canonical)
    _everywhere(kv_cache.kv_order, order)


def stale_values() -> None:
    """openvino: attention over a cache multiplies the rows that were overwritten by 0, and 0 times NaN is NaN."""
    import openvino.opset16 as op

    from dlinfer.vendor.openvino import engine
    from dlinfer.vendor.openvino.lowerings import attention
    from dlinfer.vendor.openvino.lowerings.matrix import product

    del engine

    def over_rows(b: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        last = b.scalar(len(q.get_partial_shape()) - 1, attention.I64)
        scores = op.scatter_update(
            product(q, k.base, False, True), k.index, product(q, k.source, False, True), last
        )
        scores = op.multiply(scores, b.scalar(scale, scores.output(0).get_element_type())).output(0)
        scores = scores if mask is None else op.add(scores, mask).output(0)
        shares = op.softmax(scores, len(q.get_partial_shape()) - 1).output(0)
        fresh = op.gather(shares, k.index, last).output(0)
        nothing = op.multiply(fresh, b.scalar(0.0, fresh.get_element_type()))
        stale = op.scatter_update(shares, k.index, nothing, last).output(0)
        return op.add(product(stale, v.base), product(fresh, v.source)).output(0)

    _everywhere(attention._over_rows, over_rows)


def lost_digits() -> None:
    """openvino: softplus, logsigmoid and elu subtract what is nearly equal."""
    import openvino as ov
    import openvino.opset16 as op

    wide = ov.Type.f32

    def soft(b: Any, x: Any) -> Any:
        return op.log(op.add(b.scalar(1.0, wide), op.exp(op.negative(op.abs(x)))))

    def softplus(b: Any, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
        scaled = op.multiply(b.cast(x, wide), b.scalar(beta, wide))
        made = op.divide(
            op.add(op.maximum(scaled, b.scalar(0.0, wide)), soft(b, scaled)), b.scalar(beta, wide)
        )
        above = op.greater(scaled, b.scalar(threshold, wide))
        return b.cast(op.select(above, b.cast(x, wide), made).output(0), b.kind)

    def log_sigmoid(b: Any, x: Any) -> Any:
        given = b.cast(x, wide)
        return b.cast(op.subtract(op.minimum(given, b.scalar(0.0, wide)), soft(b, given)).output(0), b.kind)

    def elu(b: Any, x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
        given = b.cast(x, wide)
        below = op.subtract(op.exp(op.multiply(given, b.scalar(input_scale, wide))), b.scalar(1.0, wide))
        low = op.multiply(below, b.scalar(alpha * scale, wide))
        above = op.greater(given, b.scalar(0.0, wide))
        return b.cast(op.select(above, op.multiply(given, b.scalar(scale, wide)), low).output(0), b.kind)

    _lowers(aten.softplus.default, softplus)
    _lowers(aten.log_sigmoid.default, log_sigmoid)
    _lowers(aten.elu.default, elu)


def flat_indices() -> None:
    """openvino: several indices become one that nobody compares with the sizes: it reaches another row."""
    import openvino as ov
    import openvino.opset16 as op

    from dlinfer.vendor.openvino import engine, registry

    del engine
    whole = ov.Type.i64
    sound = registry._table[aten.index.Tensor]

    def index(b: Any, x: Any, indices: Any) -> Any:
        if [dim for dim, one in enumerate(indices) if one is not None] != [0, 1]:
            return sound.build(b, x, indices)
        shape = op.shape_of(x, "i64")
        sizes = [op.gather(shape, b.scalar(dim, whole), b.scalar(0, whole)) for dim in (0, 1)]
        counted = [
            op.select(op.less(one, b.scalar(0, whole)), op.add(one, size), one)
            for one, size in zip((b.cast(one, whole) for one in indices[:2]), sizes, strict=True)
        ]
        places = op.add(op.multiply(counted[0], sizes[1]), counted[1])
        rank = len(x.get_partial_shape())
        rest = [op.gather(shape, b.axes(list(range(2, rank))), b.scalar(0, whole))] if rank > 2 else []
        flat = op.reshape(x, op.concat([b.axes([-1]), *rest], 0), False)
        return op.gather(flat, places, b.scalar(0, whole)).output(0)

    registry._table[aten.index.Tensor] = dataclasses.replace(sound, build=index)


def experts_unchecked() -> None:
    """openvino: ids of experts that are not there are taken, as the nearest ones."""
    from dlinfer.vendor.openvino import engine, registry

    del engine
    target = torch.ops.dlinfer.fused_moe.default
    sound = registry._table[target].build

    def build(b: Any, x: Any, gate_up: Any, down: Any, weights: Any, ids: Any, *rest: Any) -> Any:
        import openvino as ov
        import openvino.opset16 as op

        last = b.scalar(3, ov.Type.i64)
        clipped = op.minimum(op.maximum(b.cast(ids, ov.Type.i64), b.scalar(0, ov.Type.i64)), last).output(0)
        return sound(b, x, gate_up, down, weights, clipped, *rest)

    _lowers(target, build)


def comparisons_of_nan() -> None:
    """openvino: greater and greater-or-equal say true of NaN, as its plugin does on some CPUs."""
    import openvino.opset16 as op

    from dlinfer.vendor.openvino import engine, registry

    del engine
    for target, other in (
        (aten.gt.Scalar, op.less_equal),
        (aten.ge.Scalar, op.less),
        (aten.gt.Tensor, op.less_equal),
    ):
        sound = registry._table[target].build

        def build(b: Any, x: Any, y: Any, _other: Any = other, _sound: Any = sound) -> Any:
            if not hasattr(x, "get_element_type") or not x.get_element_type().is_real():
                return _sound(b, x, y)
            y = (
                b.cast(y, x.get_element_type())
                if hasattr(y, "get_element_type")
                else b.scalar(y, x.get_element_type())
            )
            return op.logical_not(_other(x, y)).output(0)

        _lowers(target, build)


def state_unasked() -> None:
    """Every engine: a graph runs under whatever autocast, gradients and default dtype the caller has."""
    from dlinfer.graph.ir.global_state import Requirement

    Requirement.run = lambda self, program, inputs: program(*inputs)


def results_unchecked() -> None:
    """inductor: loops trust the sizes and dtypes that a custom op's fake function says."""
    from dlinfer.graph.ir import callee, result_check

    del callee
    _everywhere(result_check.check_result, lambda *given: None)


def opaque_ops_merged() -> None:
    """Every engine: an op of another library that declares no write is pure, and two equal calls are one."""
    from dlinfer.graph.ir import dialect

    _everywhere(dialect.has_hidden_effects, lambda node: False)


def writes_uncounted() -> None:
    """inductor: kernels that write an input do not count in ``tensor._version``."""
    from dlinfer.graph.ir import callee

    callee.increment_version = lambda tensors: None


def bits_unresolved() -> None:
    """Every engine: an input that torch holds lazily negated is read as it lies in memory."""
    from dlinfer.graph.ir import conj_neg

    _everywhere(conj_neg.lazy_inputs, lambda values: ())
    _everywhere(conj_neg.is_lazy, lambda value: False)


def bools_apart() -> None:
    """Every engine: bools and wider numbers are taken to lie apart, and no call looks."""
    from dlinfer.graph.lowering import apart

    _everywhere(apart.check_apart, lambda pairs, inputs: None)


def data_reassigned() -> None:
    """Every engine: ``x.data = y`` is taken for an ordinary write, whose result alone counts."""
    from dlinfer.graph.ir import dialect

    dialect._REPLACES_MEMORY = frozenset()
    from dlinfer.graph.passes import functionalize_writes

    functionalize_writes._Seen.is_private = _private_by_result


def _private_by_result(self: Any, write: Any) -> bool:
    from dlinfer.graph.ir.dialect import storages, written_arguments

    memory = storages(write)
    return (
        bool(memory)
        and written_arguments(write) == [write.args[0]]
        and self.outside.isdisjoint(memory)
        and all(self.last_use.get(one, -1) <= self.position[write] for one in memory)
    )


def data_unseen() -> None:
    """openvino: weights that the caller changes through ``.data`` stay what they were."""
    from dlinfer.graph.engine_kit.weight_samples import WeightSamples

    WeightSamples.same = lambda self: True


def floats_folded() -> None:
    """Every engine: a float argument is a constant of the graph, so that each value compiles another."""
    from dlinfer.graph.capture import float_inputs

    _everywhere(float_inputs.changing_floats, lambda graph: set())


def plain_results_refused() -> None:
    """Every engine: a saved artifact with a result that is None or a number is called damaged."""
    from dlinfer.errors import ArtifactCorruptError
    from dlinfer.graph.codec import graph

    sound = graph.decode

    def decode(item: Any, references: Any) -> Any:
        found = sound(item, references)
        if found is None and sys._getframe(1).f_code.co_name == "<genexpr>":
            raise ArtifactCorruptError(path="program.dlinfer", detail="an output that is no node")
        return found

    graph.decode = decode


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "attention_layout": ("inductor", attention_layout),
    "cache_layout": ("inductor", cache_layout),
    "stale_values": ("openvino", stale_values),
    "lost_digits": ("openvino", lost_digits),
    "flat_indices": ("openvino", flat_indices),
    "experts_unchecked": ("openvino", experts_unchecked),
    "comparisons_of_nan": ("openvino", comparisons_of_nan),
    "state_unasked": ("inductor", state_unasked),
    "results_unchecked": ("inductor", results_unchecked),
    "opaque_ops_merged": ("inductor", opaque_ops_merged),
    "writes_uncounted": ("inductor", writes_uncounted),
    "bits_unresolved": ("inductor", bits_unresolved),
    "bools_apart": ("inductor", bools_apart),
    "data_reassigned": ("inductor", data_reassigned),
    "data_unseen": ("openvino", data_unseen),
    "floats_folded": ("inductor", floats_folded),
    "plain_results_refused": ("inductor", plain_results_refused),
}
"""Name -> the engine that shows it, and what puts it in place."""


def plant(name: str) -> None:
    """Put a fault in place; none for an empty name. Self-tests, which would find some of them, do not run."""
    if name:
        from dlinfer.graph.selftest.suite import SelfTest

        SelfTest.failure = lambda self, op, precision: None
        FAULTS[name][1]()
