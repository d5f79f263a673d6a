"""Write a graph in dlinfer's dialect as JSON, and read it.

The file stores the inputs' dtypes and sizes, and every call. It does not store the sizes, dtypes and strides of
results, because compiled loops read memory by these numbers, and a file may be wrong. Instead, the reader runs every op
on fake tensors.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from dlinfer.graph.capture.retrace import fake_result
from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.codec.arguments import (
    CodecError,
    Json,
    decode,
    encode,
    first_line,
    is_list,
    name_of,
    refuse_malformed,
)
from dlinfer.graph.codec.calls import call_text, check_call, resolve_call
from dlinfer.graph.codec.interface import read_interface, write_interface
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.ir.dialect import (
    STATIC,
    attribute,
    fake,
    model_line,
    placed_memory,
    reshapes_argument,
    storages,
)
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.layout import span
from dlinfer.graph.torch_private.expressions import Size
from dlinfer.graph.torch_private.fake_mode import FakeTensorMode, strict_mode
from dlinfer.graph.torch_private.symbol_guards import conditions_of
from dlinfer.graph.torch_private.symbols import new_symbol, plain_symbol
from dlinfer.ops.core.spec import NAMESPACE, registry

_MOST_NODES = 1_000_000
_FUSED = f"{NAMESPACE}::"


@dataclass(frozen=True)
class Layout:
    """A weight's layout in memory. The graph is right only for weights with this layout."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device)

    @property
    def span(self) -> int:
        """The number of bytes from the first element to the end of the last element."""
        return span(self.sizes, self.strides) * self.dtype.itemsize


# --- writing


def write_graph(graph_module: fx.GraphModule, interface: Interface) -> tuple[Json, list[torch.Tensor]]:
    """Return the written form of a graph, and the tensors of its constants.

    In the graph, the STATIC inputs (weights) must come before all other inputs. The written form numbers first the
    weights and then the constants; other inputs have only names. Raises CodecError if a part of the graph has no
    written form.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    weights = sum(bool(node.meta.get(STATIC)) for node in placeholders)
    constants: list[torch.Tensor] = []
    nodes: list[Json] = []
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            nodes.append({"name": name_of(node.name), "constant": weights + len(constants)})
            constants.append(_constant(node, graph_module))
        elif node.op not in ("placeholder", "output"):
            nodes.append(_write_call(node))
    results: Any = graph_module.graph.output_node().args[0]
    data = {
        "ops": {name: registry()[name].version for name in sorted(_fused_ops(nodes))},
        "interface": write_interface(interface),
        "weights": weights,
        "inputs": [name_of(node.name) for node in placeholders],
        "nodes": nodes,
        "outputs": [encode(result) for result in results],
    }
    return data, constants


def other_op_versions(data: Json) -> Iterator[tuple[str, int, int]]:
    """Yield (name, version in the file, version here) for each dlinfer op with different versions.

    Version 0 means that this dlinfer has no such op. An op without a version in the file has version 1.
    """
    written = dict(data.get("ops") or {})
    for name in sorted(_fused_ops(data["nodes"])):
        version, here = written.get(name, 1), registry()[name].version if name in registry() else 0
        if version != here:
            yield name, version, here


def _fused_ops(nodes: Json) -> set[str]:
    calls = (item.get("call") for item in nodes)
    return {call.removeprefix(_FUSED) for call in calls if isinstance(call, str) and call.startswith(_FUSED)}


def _constant(node: fx.Node, graph_module: fx.GraphModule) -> torch.Tensor:
    value = attribute(graph_module, str(node.target))
    if type(value) is not torch.Tensor:
        raise CodecError(f"constant {node.name} is a {type(value).__name__}")
    return value


def _write_call(node: fx.Node) -> Json:
    if reshapes_argument(node):  # on reading, the argument would have the new sizes from the start
        raise CodecError(f"node {node.name} changes the sizes of a tensor in place")
    placed = placed_memory(node)
    if placed and any(storages(value) & placed for value in node.graph.find_nodes(op="placeholder")):
        # The input of another run, or a weight in a file, has another storage offset.
        raise CodecError(
            f"node {node.name} reads an input at a fixed storage offset, and later calls have other offsets"
        )
    try:
        written: dict[str, Json] = {
            "name": name_of(node.name),
            "call": call_text(node.target),
            "args": [encode(arg) for arg in node.args],
        }
        if node.kwargs:
            written["kwargs"] = {key: encode(value) for key, value in node.kwargs.items()}
    except CodecError as cause:
        raise CodecError(f"node {node.name}: {cause}") from cause
    path, colon, rest = model_line(node).partition(":")
    line = "/".join(path.split("/")[-3:]) + colon + rest  # without the folders of this machine
    return written | {"line": line} if line else written


# --- reading


@dataclass
class ReadGraph:
    """A graph read from its written form.

    captured: the graph and the fakes of its inputs. The fakes belong to a new fake mode.
    symbols: name of a symbol in the file -> its symbolic size in this fake mode.
    interface: the interface in the file, with two additions: the conditions on sizes that arose while the ops ran on
        fakes, and the flag ``written`` of each input.
    writes: numbers of the weights and constants that the graph writes.
    """

    captured: Captured
    symbols: dict[str, torch.SymInt]
    interface: Interface
    writes: frozenset[int]


def read_graph(
    data: Json,
    weights: Sequence[Layout],
    constants: Mapping[int, torch.Tensor],
    allowed: Collection[str] = (),
) -> ReadGraph:
    """Return the graph that ``write_graph`` wrote, after every op ran on fake tensors.

    weights: the layouts of the weights, then of the constants.
    constants: number -> the constant's tensor.
    allowed: names of trusted ops outside torch's and dlinfer's own namespaces.
    Raises CodecError if ``data`` is not such a graph, or if the graph cannot run on weights of these layouts.
    """
    with refuse_malformed():
        return _Reader(data, weights, constants, allowed).read()


@dataclass
class _Reader:
    data: Json
    weights: Sequence[Layout]
    constants: Mapping[int, torch.Tensor]
    allowed: Collection[str]
    mode: FakeTensorMode = field(default_factory=strict_mode)
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    symbols: dict[str, torch.SymInt] = field(default_factory=dict[str, torch.SymInt])
    attributes: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    weight_numbers: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])

    def read(self) -> ReadGraph:
        interface = read_interface(self.data["interface"])
        for number, (name, (low, high)) in enumerate(interface.symbols.items()):
            if low < 0:
                raise CodecError(f"a size has the range {low} to {high}")
            self.symbols[name] = new_symbol(self.mode, number, low, high, interface.examples.get(name))
        names = {plain_symbol(value): name for name, value in self.symbols.items()}
        conditions = {str(size): size for size in interface.conditions}
        with torch.no_grad():
            for condition in interface.conditions:
                torch._check(  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
                    condition.evaluate(self.symbols)
                )
            inputs = self.add_inputs(interface)
            for item in _list(self.data["nodes"]):
                self.add_node(item)
        outputs = self.decoded(self.data["outputs"])
        if not all(value is None or isinstance(value, (fx.Node, bool, int, float, str)) for value in outputs):
            raise CodecError("an output is neither a node nor a plain value")
        self.graph.output(outputs)
        conditions |= {str(size): size for size in conditions_of(self.mode, names)}
        effects = effects_of(self.graph)
        fakes = tuple(fake(node) for node in self.graph.find_nodes(op="placeholder"))
        ports = tuple(
            replace(port, written=effects.is_written(node))
            for node, port in zip(inputs, interface.inputs, strict=True)
        )
        return ReadGraph(
            Captured(fx.GraphModule(self.attributes, self.graph, "graph"), fakes, self.mode),
            self.symbols,
            replace(interface, inputs=ports, conditions=tuple(conditions.values())),
            frozenset(number for node, number in self.weight_numbers.items() if effects.is_written(node)),
        )

    def add_inputs(self, interface: Interface) -> list[fx.Node]:
        """Add placeholders for the weights, then for the other inputs.

        Return the placeholders that have a port in the interface. Weights and constants have none.
        """
        weights, constants = self.data["weights"], interface.constants
        nodes = [self.add(name_of(name), "placeholder", name) for name in _list(self.data["inputs"])]
        if type(weights) is not int or len(nodes) != weights + len(interface.inputs) + len(constants):
            raise CodecError("its inputs do not match its weights and its interface")
        for number, node in enumerate(nodes[:weights]):
            node.meta |= {STATIC: True, "val": self.weight(node, number)}
        for place, value in constants.items():
            nodes[weights + place].meta["val"] = value
        inputs = [node for place, node in enumerate(nodes[weights:]) if place not in constants]
        for node, port in zip(inputs, interface.inputs, strict=True):
            if None in port.sizes:
                raise CodecError(f"input {port.name} has an unknown size")
            sizes, strides = self.numbers(port.sizes), self.numbers(port.strides or ())
            if port.number:
                node.meta["val"] = sizes[0]
                continue
            with self.mode:
                node.meta["val"] = torch.empty(sizes, dtype=port.dtype, device=port.device)
                if port.strides is not None:
                    node.meta["val"] = node.meta["val"].new_empty_strided(sizes, strides)
        return inputs

    def numbers(self, sizes: Sequence[Size | None]) -> list[int]:
        return [size.evaluate(self.symbols) for size in sizes if size is not None]

    def weight(self, node: fx.Node, number: Json) -> torch.Tensor:
        if type(number) is not int or not 0 <= number < len(self.weights):
            raise CodecError(f"there is no weight {number}")
        self.weight_numbers[node] = number
        layout = self.weights[number]
        with self.mode:
            return torch.empty_strided(layout.sizes, layout.strides, dtype=layout.dtype, device=layout.device)

    def add_node(self, item: Json) -> None:
        name = name_of(item["name"])
        if "constant" in item:
            node = self.add(name, "get_attr", f"_{name}")
            node.meta["val"] = self.weight(node, item["constant"])
            self.attributes[f"_{name}"] = self.constants[item["constant"]]
            return
        args = self.decoded(item["args"])
        kwargs = {
            key: decode(value, self.references) for key, value in dict(item.get("kwargs") or {}).items()
        }
        node = self.add(name, "call_function", resolve_call(item["call"], self.allowed), args, kwargs)
        try:
            node.meta["val"] = fake_result(node, self.mode, check_call)
        except Exception as cause:  # an op's fake function may raise anything; the node's name is what helps
            raise CodecError(f"node {name}: {item['call']}: {first_line(cause)}") from cause
        node.meta["stack_trace"] = _stack_trace(item.get("line"))

    def add(
        self,
        name: str,
        op: str,
        target: str | Callable[..., object],
        args: tuple[Argument, ...] = (),
        kwargs: dict[str, Argument] | None = None,
    ) -> fx.Node:
        if name in self.nodes or len(self.nodes) >= _MOST_NODES:
            raise CodecError(f"two nodes have the name {name}, or there are too many nodes")
        node = self.nodes[name] = self.graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            raise CodecError(f"{name} is a Python keyword or a name that torch.fx does not allow")
        return node

    @property
    def references(self) -> dict[str, Callable[[str], fx.Node]]:
        return {"node": self.node}

    def decoded(self, items: Json) -> tuple[Any, ...]:
        return tuple(decode(item, self.references) for item in _list(items))

    def node(self, name: str) -> fx.Node:
        if name not in self.nodes:
            raise CodecError(f"node {name[:80]!r} is missing, or comes later")
        return self.nodes[name]


def _list(data: Json) -> list[Json]:
    if not is_list(data):
        raise CodecError("a list is missing")
    return data


def _stack_trace(line: Json) -> str:
    """Return a line ``file:number`` of the model's source as a stack trace; empty if the line has another form.

    ``model_line`` reads the file and the number from this trace.
    """
    if not isinstance(line, str) or any(sign in line for sign in '\n\r"') or len(line) > 500:
        return ""
    path, colon, rest = line.partition(":")
    return f'  File "{path}", line {rest}' if colon else ""
