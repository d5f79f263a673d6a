"""Read torch.export's ExportedProgram as a captured graph with its weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.retrace import RetraceError, retrace
from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.ir.conj_neg import lazy_inputs, refuse_shared, resolved
from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.ir.dialect import STATIC
from dlinfer.graph.ir.global_state import explicit_dtypes
from dlinfer.graph.torch_private.fake_mode import mode_of

Reference = Callable[[Sequence[torch.Tensor], Sequence[object]], Sequence[object]]
"""A function that runs the module on (weights, inputs), and returns its outputs. It may write into its arguments."""


@dataclass(frozen=True)
class Exported:
    """A graph that torch.export captured.

    weights: the tensors of the STATIC inputs: parameters, buffers and constants of the module.
    inputs: the module's names for the inputs that are not weights.
    names: a name for each output of the module.
    ranges: symbol -> the range that torch.export knows for it.
    examples: a value for each input that is not a weight; None if the values are unknown.
    reference: a function that runs the module; None if the module is unknown.
    """

    captured: Captured
    weights: list[torch.Tensor]
    inputs: list[str]
    names: list[str]
    ranges: Mapping[Any, Any]
    examples: Sequence[object] | None
    reference: Reference | None

    @property
    def device(self) -> torch.device:
        """The device of the graph's inputs and weights. The graph runs there."""
        return graph_device(self.captured.fakes)


def read_export(
    program: ExportedProgram,
    module: torch.nn.Module | ExportedProgram,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
) -> Exported:
    """Return the graph of an exported program, with its weights. Raises CaptureError.

    The program already is in dlinfer's dialect: it has ATen ops before dispatch, in-place writes, and weights as
    inputs.
    module: the module that was exported; ``program`` itself if the module is unknown.
    args, kwargs: the example inputs of the module.
    """
    signature = program.graph_signature
    if any(spec.kind != OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise CaptureError(
            reason=(
                "its writes are outputs of the graph, as after run_decompositions(); pass the program without this "
                "call"
            ),
            line="ExportedProgram",
        )
    graph_module = torch.fx.GraphModule(program.graph_module, _copied(program.graph))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    called = input_names(placeholders, program)
    weights: list[torch.Tensor] = []
    targets: list[str] = []
    inputs: list[str] = []
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(called[node])
        else:
            node.meta[STATIC] = True
            target = str(spec.target)
            held: Any = program.state_dict if target in program.state_dict else program.constants
            weights.append(held[target])
            targets.append(target)
    fakes = tuple(node.meta["val"] for node in placeholders)
    captured = _with_resolved(Captured(graph_module, fakes, mode_of(fakes)), weights)
    explicit_dtypes(captured.graph_module.graph)  # an artifact may run under another default dtype
    is_program = isinstance(module, ExportedProgram)
    return Exported(
        captured,
        weights,
        inputs,
        _output_names(program),
        program.range_constraints,  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType] - bare ValueRanges
        None if is_program else pytree.tree_leaves((args, dict(kwargs or {}))),
        None if is_program else _reference(module, targets, program),
    )


def _with_resolved(captured: Captured, weights: list[torch.Tensor]) -> Captured:
    """Replace each weight that is lazily conjugated or negated with a resolved copy.

    Raises CaptureError if the graph writes any input, or returns a replaced weight: the caller would notice the copy.
    """
    lazy = lazy_inputs(weights)
    if not lazy:
        return captured
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    static = [index for index, node in enumerate(placeholders) if node.meta.get(STATIC)]
    refuse_shared(captured.graph_module.graph, [static[index] for index in lazy])
    inputs = {node: node.meta["val"] for node in placeholders}
    for index in lazy:
        weights[index] = resolved(weights[index])
        inputs[placeholders[static[index]]] = captured.mode.from_tensor(weights[index], static_shapes=True)
    try:
        again = retrace(captured.graph_module, inputs, captured.mode)
    except RetraceError as cause:
        raise CaptureError(
            reason=f"the graph cannot be re-traced with resolved conjugated weights: {cause}",
            line="torch.export",
        ) from cause
    return Captured(again, tuple(inputs.values()), captured.mode)


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy of the graph. Passes may change the copy.

    The copy has no checks of dtype and device (``_assert_tensor_metadata``), because the fake tensors passed them.
    """
    copy = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.target is not torch.ops.aten._assert_tensor_metadata.default:
            copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy


def input_names(placeholders: Iterable[torch.fx.Node], program: ExportedProgram) -> dict[torch.fx.Node, str]:
    """Return placeholder -> the module's name for this input.

    The placeholder may have another name: fx names it ``input_1`` if the module's name is a Python builtin, such as
    ``input``.
    """
    signature = program.module_call_graph[0].signature
    parameters = set((signature.forward_arg_names if signature is not None else None) or ())
    names: dict[torch.fx.Node, str] = {}
    for node in placeholders:
        word = node.name.removesuffix("_1")
        names[node] = word if word in parameters and node.name not in parameters else node.name
    return names


def _output_names(program: ExportedProgram) -> list[str]:
    """Return a name for each output of the module.

    The name is a dict key or field, such as ``logits``. Tuple items are ``output_0``, ``output_1``, ... A single output
    is ``output``. If two outputs would get the same name, all outputs are numbered like tuple items.
    """
    spec = program.call_spec.out_spec
    assert spec is not None
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    names = ["_".join(filter(None, map(_part, path))) for path, _ in leaves]
    names = [f"output_{name}" if name[:1].isdigit() else name or "output" for name in names]
    if len(set(names)) < len(names):
        names = [f"output_{index}" for index in range(len(names))]
    return names


def _part(key: object) -> str:
    text = str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def _reference(module: torch.nn.Module, targets: list[str], program: ExportedProgram) -> Reference:
    spec = program.call_spec.in_spec
    assert spec is not None
    known = dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )

    def run(weights: Sequence[torch.Tensor], leaves: Sequence[object]) -> Sequence[object]:
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        swapped = {name: weight for name, weight in zip(targets, weights, strict=True) if name in known}
        return pytree.tree_leaves(
            torch.func.functional_call(module, swapped, args, kwargs, tie_weights=False)
        )

    return run
