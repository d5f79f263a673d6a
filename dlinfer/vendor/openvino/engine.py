"""The graph engine ``openvino``: a region is one OpenVINO model, for all sizes, on torch's memory."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from dlinfer.errors import NotAFunctionError
from dlinfer.graph import torch_seam, values
from dlinfer.graph.cached_attention import cached_attention_pass
from dlinfer.graph.dialect import is_compute, op_name, overload, written_arguments
from dlinfer.graph.eager_region import eager_program, eager_region, leave_for_a_call
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.output_sizes import UnknownSizeError
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.torch_steps import TorchSteps
from dlinfer.graph.value_twins import Twin, twin_of
from dlinfer.vendor.openvino import lowerings, registry
from dlinfer.vendor.openvino.builder import LoweringError
from dlinfer.vendor.openvino.devices import check_device, core, properties
from dlinfer.vendor.openvino.options import OpenVINOOptions
from dlinfer.vendor.openvino.region import Region
from dlinfer.vendor.openvino.registry import Call
from dlinfer.vendor.openvino.requests import Requests
from dlinfer.vendor.openvino.template import OUTPUT, Result, Template, template_of
from dlinfer.vendor.openvino.weights import with_weights

assert lowerings  # imported for what it registers

SMALLEST = 4
"""Computing nodes that a region without a product of matrices needs: entering costs as much as some eager calls."""


class OpenVINOEngine(TorchSteps):
    """Graphs in OpenVINO's runtime."""

    name = "openvino"
    passes: Sequence[Pass] = (cached_attention_pass(name),)
    stored_options: Collection[str] = (
        "precision",
        "weights",
        "group_size",
        "dynamic_quantization_group_size",
    )
    phases_alike = True  # OpenVINO's attention takes any number of new tokens of each sequence

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises CompileOptionError."""
        chosen = OpenVINOOptions.of(options)
        if chosen.device != "CPU":
            check_device(chosen.device)

    def refuses(self, node: fx.Node) -> str | None:
        """Why a node is not taken: its effect is no value, or it has no lowering for these arguments."""
        if node.op != "call_function":
            return None
        if isinstance(node.target, torch_seam.HigherOrderOperator):
            return f"{node.target} is a higher-order op"
        if (reason := values.refusal(node)) is not None:
            return reason
        if values.is_check(node):
            return None
        if written_arguments(node):
            twin = twin_of(node)
            assert isinstance(twin, Twin), "refused before"
            return None if twin.op is None else registry.refusal(_twin_call(node, twin))
        return registry.refusal(Call.of(node))

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """Small regions of element-wise work cost more to enter than they save."""
        computing = [node for node in nodes if is_compute(node)]
        if len(computing) >= SMALLEST or any(map(_is_heavy, computing)):
            return None
        return f"{len(computing)} nodes cost less than entering OpenVINO"

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """The region as a model; a region that OpenVINO cannot express runs eagerly, under the policy."""
        name = region.graph_module._get_name()
        try:
            function = values.function_of(region)
            template = template_of(function, name)
        except NotAFunctionError as cause:
            node, reason = str(cause.fields["node"]), str(cause.fields["reason"])
            return eager_region(region, self.name, options, f"{node}: {reason}", {node: reason})
        except LoweringError as cause:
            reason = str(cause)
            return eager_region(region, self.name, options, f"{cause.node}: {reason}", {cause.node: reason})
        except UnknownSizeError as cause:
            return eager_region(
                region, self.name, options, f"a result's size does not follow from inputs: {cause}"
            )
        return self._compiled(region, options, function, template)

    def _compiled(
        self, region: Subgraph, options: CompileOptions, function: values.Function, template: Template
    ) -> CompiledRegion:
        chosen = OpenVINOOptions.of(options.wanted_engine_options)
        if (reason := template.misfit(chosen)) is not None:
            return eager_region(region, self.name, options, reason)
        names = [node.name for node in region.graph_module.graph.find_nodes(op="placeholder")]
        computing = [n for n in region.graph_module.graph.nodes if n.op == "call_function" and is_compute(n)]

        eager = eager_program(region)

        def leave(reason: str) -> None:
            leave_for_a_call(region, self.name, reason, options.policy)

        run = Region(template, function, names, _builder(template, chosen), eager, leave)
        placement = {node.name: "kernel OpenVINO" for node in computing}
        return CompiledRegion(run, placement, notes=template.notes)

    def keeps(self, callees: Collection[str]) -> bool:
        """Compiled models are made anew in each process."""
        return False

    def identity(self, cache_dir: Path) -> str:
        """The runtime's version."""
        import openvino

        return f"openvino {openvino.__version__}"


def _builder(template: Template, options: OpenVINOOptions) -> Callable[[tuple[Tensor, ...]], Requests]:
    """What compiles a template with weights."""
    dtypes = [dtype for result in template.results for dtype in _dtypes(result)]
    dtypes += [torch.bool] * len(template.faults)

    def build(weights: tuple[Tensor, ...]) -> Requests:
        given = {template.inputs[index]: weight for index, weight in zip(template.held, weights, strict=True)}
        model, keep = with_weights(template.model, given, options, template.notes)
        compiled = core().compile_model(
            model, options.device, properties(options, template.precision, template.cache)
        )
        return Requests(compiled, dtypes, (keep, template.keep))

    return build


def _dtypes(result: Result) -> list[torch.dtype]:
    dtype = getattr(torch, result.dtype)
    origins = {
        "fresh": [(result.source, dtype)],
        "rows": [(result.source, dtype), (result.index, torch.int64)],
    }
    return [kind for origin, kind in origins.get(result.kind, []) if origin == OUTPUT]


def _twin_call(node: fx.Node, twin: Twin) -> Call:
    """The call of a writing node's functional twin."""
    op = twin.op
    assert op is not None
    names = [one.name for one in op._schema.arguments]
    defaults = {one.name: one.default_value for one in op._schema.arguments if one.has_default_value()}
    given = defaults | dict(zip(names, twin.args, strict=False)) | twin.kwargs
    contents = [target.meta["val"] for target in twin.targets]
    result = contents[0] if len(contents) == 1 else contents
    return Call(op, {name: given[name] for name in names if name in given}, result, op_name(node))


_HEAVY = ("linear", "matmul", "mm", "conv", "attention", "moe")


def _is_heavy(node: fx.Node) -> bool:
    op = overload(node)
    return op is not None and any(word in op._schema.name for word in _HEAVY)
