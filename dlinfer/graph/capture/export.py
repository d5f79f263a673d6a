"""An ExportedProgram as a captured graph with its weights, and the sizes that it supports."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.retrace import RetraceError, retrace
from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.capture.zero_one_specialization import Reference, Trial
from dlinfer.graph.ir.conj_neg import lazy_inputs, refuse_shared, resolved
from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.ir.dialect import STATIC
from dlinfer.graph.ir.global_state import explicit_dtypes
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.torch_private.expressions import SizeTextError, to_size
from dlinfer.graph.torch_private.fake_mode import mode_of, strict_mode
from dlinfer.graph.torch_private.guards import conditions_of
from dlinfer.graph.torch_private.symbols import declared_range, new_symbol, symbols_of


@dataclass(frozen=True)
class Exported:
    """A captured graph of torch.export's.

    weights: tensors of its STATIC inputs. inputs: what the module calls each of the others.
    ranges: what torch.export was told of its symbols. names: one for each output that the module gives.
    examples: a value for each input that the caller passes, and reference: the module; None where unknown.
    """

    captured: Captured
    weights: list[torch.Tensor]
    inputs: list[str]
    names: list[str]
    ranges: Mapping[Any, Any]
    examples: Sequence[Any] | None
    reference: Reference | None

    @property
    def device(self) -> torch.device:
        """Where the graph runs, by its inputs and weights."""
        return graph_device(self.captured.fakes)


def read_export(
    program: ExportedProgram,
    module: torch.nn.Module | ExportedProgram,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
) -> Exported:
    """The graph of a program, which is in the dialect already: ATen before dispatch, writes in place, weights as
    inputs. Raises CaptureError."""
    signature = program.graph_signature
    if any(spec.kind != OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise CaptureError(
            reason="its writes are outputs of the graph, as run_decompositions makes them",
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
    explicit_dtypes(captured.graph_module.graph)  # an artifact is called, and loaded, under other defaults
    is_program = isinstance(module, ExportedProgram)
    return Exported(
        captured,
        weights,
        inputs,
        _output_names(program),
        program.range_constraints,
        None if is_program else pytree.tree_leaves((args, dict(kwargs or {}))),
        None if is_program else _reference(module, targets, program),
    )


def _with_resolved(captured: Captured, weights: list[torch.Tensor]) -> Captured:
    """Replace weights that torch holds lazily conjugated or negated by resolved copies.

    Raises CaptureError where the graph writes its inputs or returns such a weight, because a copy would be seen.
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
            reason=f"with its conjugated weights resolved: {cause}", line="torch.export"
        ) from cause
    return Captured(again, tuple(inputs.values()), captured.mode)


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph that the passes may change, without assertions of what the graph's own fakes say.

    The caller's ExportedProgram keeps its own.
    """
    copy = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.target is not torch.ops.aten._assert_tensor_metadata.default:
            copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy


def input_names(placeholders: Iterable[torch.fx.Node], program: ExportedProgram) -> dict[torch.fx.Node, str]:
    """The names of the module's inputs. fx puts a number behind a word of Python's: ``input`` is node ``input_1``."""
    signature = program.module_call_graph[0].signature
    parameters = set((signature.forward_arg_names if signature is not None else None) or ())
    names = {}
    for node in placeholders:
        word = node.name.removesuffix("_1")
        names[node] = word if word in parameters and node.name not in parameters else node.name
    return names


def _output_names(program: ExportedProgram) -> list[str]:
    """``logits`` for a result's key or field, ``output_0`` for the first of several, ``output`` for the only one."""
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

    def run(weights: Sequence[torch.Tensor], leaves: Sequence[object]) -> Sequence[Any]:
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        swapped = {name: weight for name, weight in zip(targets, weights, strict=True) if name in known}
        return pytree.tree_leaves(
            torch.func.functional_call(module, swapped, args, kwargs, tie_weights=False)
        )

    return run


def from_one_on(exported: Exported) -> Exported:
    """Re-trace with an unbacked symbol for every size that may be 0 or 1, so that neither value is specialized.

    A size stays in the range only if a test run succeeded at it. A graph that depends on sizes of 2 or more keeps its
    range from 2 on. Raises CaptureError where the range names size 1 and the module behaves differently there.
    """
    captured = exported.captured
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    symbols = dict.fromkeys(symbol for node in placeholders for symbol in symbols_of(node.meta["val"]))
    declared = {symbol: declared_range(symbol, captured.mode, exported.ranges) for symbol in symbols}
    lows = {symbol: low for symbol, (low, _, _) in declared.items() if low < 2}
    if not lows:
        return exported
    if exported.reference is not None and exported.examples is not None:
        served = _served(exported, lows)
        for symbol, low in served.items():
            if lows[symbol] == 1 and low > 1:
                raise CaptureError(
                    reason="at a size of 1 the module gives something else than what torch.export captured for 2 "
                    "and more, so one graph cannot serve both",
                    line=f"dynamic_shapes with min=1 for {_places(placeholders, symbol)}",
                )
            declared[symbol] = (low, *declared[symbol][1:])
    try:
        captured = _over_new_symbols(captured, declared)
    except (RetraceError, SizeTextError):
        return exported
    return replace(exported, captured=captured, ranges={})


def _over_new_symbols(
    captured: Captured, declared: Mapping[Any, tuple[int, int | None, int | None]]
) -> Captured:
    """Re-trace with new symbols. declared: the lowest value, the highest and a hint of each old symbol.

    The new symbols get the guards of the old ones. Raises RetraceError, and SizeTextError for a size
    that cannot be told over the symbols.
    """
    mode = strict_mode()
    names = {symbol: f"s{number}" for number, symbol in enumerate(declared)}
    values = {
        names[symbol]: new_symbol(mode, number, *limits)
        for number, (symbol, limits) in enumerate(declared.items())
    }

    def renewed(value: object) -> Any:
        if isinstance(value, torch.SymInt):
            return to_size(value, names).evaluate(values)
        if not isinstance(value, torch.Tensor):
            return value
        sizes, kind = [renewed(size) for size in value.shape], {"dtype": value.dtype, "device": value.device}
        with mode:
            if is_contiguous(value):  # torch's own strides, which count a size that may be 0 as 1
                return torch.empty(sizes, **kind)
            return torch.empty_strided(sizes, [renewed(stride) for stride in value.stride()], **kind)

    for condition in conditions_of(captured.mode, names):
        torch._check(condition.evaluate(values))
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    inputs = {node: renewed(node.meta["val"]) for node in placeholders}
    return Captured(retrace(captured.graph_module, inputs, mode), tuple(inputs.values()), mode)


def _served(exported: Exported, lows: Mapping[Any, int]) -> dict[Any, int]:
    captured = exported.captured
    names = {symbol: str(symbol) for node in captured.fakes for symbol in symbols_of(node)}
    assert exported.examples is not None and exported.reference is not None
    try:
        conditions = conditions_of(captured.mode, names)
    except SizeTextError:
        conditions = []  # a size that one of them forbids fails its trial by itself
    trial = Trial(
        captured.graph_module,
        exported.weights,
        exported.examples,
        names,
        {names[symbol]: low for symbol, low in lows.items()},
        conditions,
        exported.reference,
    )
    served = trial.lowest()
    return {symbol: served[names[symbol]] for symbol in lows}


def _places(placeholders: Sequence[torch.fx.Node], symbol: object) -> str:
    places = [
        f"{node.name}.shape[{dim}]"
        for node in placeholders
        if isinstance(node.meta["val"], torch.Tensor)
        for dim, size in enumerate(node.meta["val"].shape)
        if isinstance(size, torch.SymInt) and size.node.expr == symbol
    ]
    return ", ".join(places)
