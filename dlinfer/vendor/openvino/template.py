"""A region (part of a graph) as an OpenVINO model with weights as parameters, and the data to run it.

Model and data can be stored, since they do not contain the weights. The data are: where each input goes, what each
output is and how large, and which conditions the inputs must meet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import openvino as ov
import torch
from openvino import Output
from torch import Tensor, fx

from dlinfer.graph.engine_kit.output_sizes import SizeText, input_size, sizes_of
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import STATIC, arguments, fake, tensors_of
from dlinfer.vendor.openvino import dtypes, lowerings, registry
from dlinfer.vendor.openvino.builder import Builder, LoweringError
from dlinfer.vendor.openvino.int_ranges.ranges import Ranges
from dlinfer.vendor.openvino.options import OpenVINOOptions
from dlinfer.vendor.openvino.registry import Call
from dlinfer.vendor.openvino.workarounds.attention import part_attention
from dlinfer.vendor.openvino.workarounds.precision import Precise
from dlinfer.vendor.openvino.written import InPlace, Rows

assert lowerings  # imported for what it registers


OUTPUT = -1
"""The origin of a value that is an output of the model, not an unchanged input."""


@dataclass(frozen=True)
class Result:
    """One output of the function: a value, or a change of an input.

    kind: ``fresh``: the value is ``source``. ``rows``: the rows ``source`` are written into the input ``target`` at the
        places ``index`` along ``dim``. ``kept``: the model itself writes into the memory of the input ``target``.
    target: position of the input that the value overwrites; None if it overwrites none.
    source, index: where these tensors come from: OUTPUT for the model's next output, or the position of an input that
        the model leaves unchanged. Such an input is no output of the model, because the CPU plugin does not copy a
        parameter into the memory of an output."""

    kind: str
    dtype: str
    target: int | None = None
    dim: int = 0
    source: int = OUTPUT
    index: int = OUTPUT


@dataclass
class Template:
    """A model, and how a region's inputs and outputs map to it.

    inputs: for each input of the region, the name of its parameter; empty if the model does not read it.
    numbers: positions of inputs that are numbers. held: positions of inputs that become constants.
    sizes: the outputs' sizes, as ``dlinfer.graph.engine_kit.output_sizes`` writes them.
    int64_inputs: positions of int64 inputs; the plugin keeps only 32 bits of them.
    limits: indices to check before each call: (position of the index input, size of the dimension that it indexes,
        whether negative indices count from the end).
    ranges: checks that a call's integers stay within 32 bits.
    faults: reasons to reject a call. For each reason, one more output of the model is a bool, which is true if the
        reason holds.
    precision: the model's own floating type. cache: the type of the KV caches that it writes; empty if there are none.
    precise: names of the nodes that compute float32 though the model's own type has 16 bits.
    keep: memory of the model's constants. notes: for reports."""

    model: ov.Model
    inputs: tuple[str, ...]
    numbers: tuple[int, ...]
    held: tuple[int, ...]
    results: tuple[Result, ...]
    sizes: list[list[SizeText]]
    int64_inputs: tuple[int, ...]
    limits: Sequence[tuple[int, SizeText, bool]]
    faults: tuple[str, ...]
    ranges: Ranges
    precision: str
    notes: list[str] = field(default_factory=list)
    keep: Sequence[Tensor] = ()
    cache: str = ""
    precise: frozenset[str] = frozenset()

    def misfit(self, options: OpenVINOOptions) -> str | None:
        """Return a reason if the model cannot be compiled with these options; else None."""
        if not self.cache:
            return None
        if options.device.split(".")[0] != "CPU":
            return f"the KV cache has the CPU's layout, not that of device {options.device!r}"
        if self.cache == "bf16" and options.precision not in ("model", "bf16"):
            return f"attention in {options.precision} cannot keep its KV cache in bfloat16"
        return None


def template_of(function: Function, name: str) -> Template:
    """Write a function in OpenVINO's opset. Raises LoweringError with the name of a node that cannot be written."""
    graph = function.graph_module.graph
    builder = Builder()
    precise = Precise()
    placeholders = graph.find_nodes(op="placeholder")
    written = {index for index in function.writes if index is not None}
    for node in graph.nodes:
        if node.op == "placeholder":
            builder.placeholder(node)
        elif node.op != "output":
            if node.op == "call_function" and (reason := registry.refusal(Call.of(node))) is not None:
                raise LoweringError(reason, node.name)
            builder.lower(node)
            precise.note(node, builder.outputs_of(node))
    outputs, results, sizes = _results(builder, graph, function.writes)
    faults = builder.found_faults()
    outputs += list(faults.values())
    sizes += [()] * len(faults)
    parameters = [builder.values[node].get_node() for node in placeholders]
    returned = {output.get_node().get_friendly_name() for output in outputs}
    names = [parameter.get_friendly_name() for parameter in parameters]
    read = [
        bool(parameter.output(0).get_target_inputs()) or name in returned
        for parameter, name in zip(parameters, names, strict=True)
    ]
    # openvino's stubs give its Model two classes
    model = ov.Model(outputs, list(compress(parameters, read)), name)  # pyright: ignore[reportGeneralTypeIssues]
    part_attention(model)
    model.validate_nodes_and_infer_types()
    precision, marked = _precision(graph), frozenset[str]()
    if precision != "f32":
        model, marked = precise.marked(model, precision)
    places = {node.name: index for index, node in enumerate(placeholders)}
    values = [fake(node) for node in placeholders]
    tensors = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
    return Template(
        model,
        inputs=tuple(name if used else "" for name, used in zip(names, read, strict=True)),
        numbers=tuple(index for index in range(len(values)) if index not in tensors),
        held=tuple(
            index
            for index in tensors
            if read[index] and placeholders[index].meta.get(STATIC) and index not in written
        ),
        results=results,
        sizes=sizes_of(sizes, values),
        int64_inputs=tuple(index for index in tensors if read[index] and values[index].dtype is torch.int64),
        limits=[
            (places[index], size if isinstance(size, int) else input_size(places[size[0]], size[1]), negative)
            for (index, _, negative), size in builder.limits.items()
        ],
        faults=tuple(faults),
        ranges=Ranges(graph, dtypes.KEPT),
        precision=precision,
        notes=builder.notes,
        keep=builder.keep,
        cache=_cache(results),
        precise=marked,
    )


def _cache(results: Sequence[Result]) -> str:
    kinds = {
        dtypes.type_of(getattr(torch, result.dtype)).get_type_name()
        for result in results
        if result.kind == "kept"
    }
    if len(kinds) > 1:
        raise LoweringError(f"the KV caches have several dtypes ({', '.join(sorted(kinds))})")
    return kinds.pop() if kinds else ""


def _precision(graph: fx.Graph) -> str:
    """Return the model's own floating type: a 16-bit one if any tensor has it, but "f32" if both 16-bit types occur.

    Packed weights do not count: they have 16-bit scales and biases in models of any dtype."""
    floats = {
        tensor.dtype for node in graph.nodes if not _of_packed_weights(node) for tensor in tensors_of(node)
    }
    if {torch.bfloat16, torch.float16} <= floats:
        return "f32"  # neither represents the other's numbers
    return "bf16" if torch.bfloat16 in floats else "f16" if torch.float16 in floats else "f32"


def _of_packed_weights(node: fx.Node) -> bool:
    packed = torch.ops.dlinfer.weight_quant_matmul.default
    users = [user for user in node.users if user.op != "output"]
    return bool(users) and all(user.target is packed and arguments(user)["x"] is not node for user in users)


def _results(
    builder: Builder, graph: fx.Graph, writes: Sequence[int | None]
) -> tuple[list[Output], tuple[Result, ...], list[Any]]:
    """Return three values: the model's outputs, a Result for each value of the function, and the outputs' sizes."""
    inputs = [builder.values[node] for node in graph.find_nodes(op="placeholder")]
    outputs: list[Output] = []
    sizes: list[Any] = []

    def origin(value: Output, shape: Any) -> int:
        if value in inputs:
            return inputs.index(value)
        outputs.append(value)
        sizes.append(tuple(shape))
        return OUTPUT

    results: list[Result] = []
    values: Any = graph.output_node().args[0]
    for node, target in zip(values, writes, strict=True):
        value, shown = builder.values[node], fake(node)
        dtype = str(shown.dtype).removeprefix("torch.")
        if isinstance(value, Rows) and target is not None and value.base == inputs[target]:
            source = origin(value.source, value.sizes)
            index = origin(value.index, (value.sizes[value.dim],))
            results.append(Result("rows", dtype, target, value.dim, source, index))
        elif isinstance(value, InPlace):
            results.append(Result("kept", dtype, target))
        else:
            source = origin(builder.assembled(node), shown.shape)
            results.append(Result("fresh", dtype, target, source=source))
    return outputs, tuple(results), sizes
