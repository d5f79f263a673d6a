"""The graph engine ``openvino``. A region becomes one OpenVINO model for all sizes, which uses torch's memory.

A region is the part of a model's graph that the engine runs.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import openvino as ov
import torch
from torch import fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.engine_kit.value_engine import ValueEngine
from dlinfer.graph.engine_kit.value_region import Lowered
from dlinfer.graph.functional.functional_ops import FunctionalCall, functional_call
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import arguments, fake, is_compute, op_name, overload, written_arguments
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.selftest.case import packet_name
from dlinfer.vendor.openvino import dtypes, lowerings, registry
from dlinfer.vendor.openvino.devices import check_device, check_process
from dlinfer.vendor.openvino.lowered import OpenVINOLowered
from dlinfer.vendor.openvino.options import OpenVINOOptions
from dlinfer.vendor.openvino.passes.cached_attention import cached_attention_pass
from dlinfer.vendor.openvino.registry import Call
from dlinfer.vendor.openvino.selftest import selftest
from dlinfer.vendor.openvino.template import template_of

assert lowerings  # imported for what it registers


class OpenVINOEngine(ValueEngine[OpenVINOOptions]):
    """Runs regions of a graph in OpenVINO's runtime."""

    name = "openvino"
    options_type = OpenVINOOptions
    passes: Sequence[Pass] = (cached_attention_pass(name),)
    stored_options: Collection[str] = (
        "precision",
        "weights",
        "group_size",
        "dynamic_quantization_group_size",
    )
    phases_alike = True  # OpenVINO's attention takes any number of new tokens of each sequence
    smallest = 4  # entering costs as much as some eager calls

    def __init__(self) -> None:
        self.selftest = selftest(self)

    def read_options(self, options: Mapping[str, object]) -> OpenVINOOptions:
        """Read the engine's options.

        Raises CompileOptionError for a wrong option or a device that OpenVINO does not find.
        Raises UnsupportedFeatureError if the process was forked after OpenVINO was loaded.
        """
        check_process()
        chosen = super().read_options(options)
        if chosen.device != "CPU":
            check_device(chosen.device)
        return chosen

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Return a reason to refuse a dtype: OpenVINO lacks it, or computes it in another type; else None."""
        return dtypes.refusal(dtype)

    def refuses_op(self, node: fx.Node) -> str | None:
        """Return a reason to refuse a node; None if OpenVINO can run it.

        A mutating node is lowered as its functional variant.
        """
        if (number := _number_beyond(node)) is not None:
            return f"{number} does not fit into its tensor's dtype, and torch wraps it around"
        if not written_arguments(node):
            return registry.refusal(Call.of(node))
        twin = functional_call(node)
        assert isinstance(twin, FunctionalCall), "refused before"
        return None if twin.op is None else registry.refusal(_twin_call(node, twin))

    def is_heavy(self, node: fx.Node) -> bool:
        """Return whether the node multiplies matrices."""
        op = overload(node)
        return op is not None and any(word in op._schema.name for word in _HEAVY)

    def lower(self, function: Function, options: OpenVINOOptions, policy: str) -> Lowered:
        """Build a model of the function. Its weights are parameters, which ``Lowered.compile`` turns into constants.

        policy: the fallback policy, which has no effect here.
        """
        template = template_of(function, type(function.graph_module).__name__)
        if (reason := template.misfit(options)) is not None:
            raise RefusedError(reason)
        precision = template.precision if options.precision == "model" else options.precision
        self._check_precision(function, precision)
        return OpenVINOLowered(function, template, options)

    def _check_precision(self, function: Function, precision: str) -> None:
        """Raise RefusedError if the self-test failed for one of the function's ops in this precision."""
        assert self.selftest is not None
        for node in function.graph_module.graph.nodes:
            if node.op == "call_function" and is_compute(node):
                reason = self.selftest.failure(packet_name(node.target), _PRECISIONS[precision])
                if reason is not None:
                    raise RefusedError(reason, node.name)

    def keeps(self, callees: Collection[str]) -> bool:
        """Return False: no other process can load a program's callees (the functions that it calls).

        OpenVINO's compiled models are not stored, so each process compiles them again.
        """
        return False

    def identity(self, cache_dir: Path) -> str:
        return f"openvino {ov.__version__}"


_PRECISIONS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_HEAVY = ("linear", "matmul", "mm", "conv", "attention", "moe")


def _number_beyond(node: fx.Node) -> int | None:
    """Return a Python int operand of a node that the integer dtype of a tensor operand cannot hold; None if all fit."""
    op = overload(node)
    if op is None:
        return None
    kinds = {value.dtype for value in map(fake, node.all_input_nodes) if isinstance(value, torch.Tensor)}
    limits = [torch.iinfo(kind) for kind in kinds & {torch.uint8, torch.int8, torch.int16, torch.int32}]
    named = arguments(node)
    numbers = [named[name] for name in ("other", "value", "min", "max") if type(named.get(name)) is int]
    return next((n for n in numbers for limit in limits if not limit.min <= n <= limit.max), None)


def _twin_call(node: fx.Node, twin: FunctionalCall) -> Call:
    """Return the call that is lowered in place of a mutating node: a call of its functional variant ``twin``."""
    op = twin.op
    assert op is not None
    parameters = op._schema.arguments
    names = [parameter.name for parameter in parameters]
    defaults = {each.name: each.default_value for each in parameters if each.has_default_value()}
    values = defaults | dict(zip(names, twin.args, strict=False)) | twin.kwargs
    contents = [target.meta["val"] for target in twin.targets]
    result = contents[0] if len(contents) == 1 else contents
    return Call(op, {name: values[name] for name in names if name in values}, result, op_name(node))
