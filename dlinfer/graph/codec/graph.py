"""A graph in the dialect as JSON, and back: inputs, nodes, outputs, and what holds of the sizes.

The file stores input dtypes, input sizes and every call. Results are recomputed on fake tensors when it is read, so
sizes, dtypes and strides inside the graph come from torch, whatever a file says: compiled loops read memory by them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from dlinfer.graph.capture.retrace import fake_result
from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.codec.arguments import (
    CodecError,
    Json,
    decode,
    device_of,
    dtype_of,
    encode,
    first_line,
    is_list,
    name_of,
    refuse_malformed,
    short_name,
)
from dlinfer.graph.codec.calls import call_text, check_call, resolve_call
from dlinfer.graph.ir.dialect import STATIC, fake, model_line, placed_memory, reshapes_argument, storages
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.ir.program import attribute
from dlinfer.graph.torch_private.expressions import Size, SizeTextError, parse_condition, parse_size, to_size
from dlinfer.graph.torch_private.fake_mode import FakeTensorMode, mode_of, strict_mode
from dlinfer.graph.torch_private.guards import conditions_of
from dlinfer.graph.torch_private.symbols import declared_range, new_symbol, plain_symbol, symbols_of
from dlinfer.ops.core.spec import NAMESPACE, registry

_MOST_NODES = 1_000_000
_FUSED = f"{NAMESPACE}::"


@dataclass(frozen=True)
class Layout:
    """How a weight lies in memory, which the graph that reads it relies on."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device)

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if 0 in self.sizes:
            return 0
        steps = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (steps + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class GraphFile:
    """A graph in its written form. constants: the tensors that its nodes name by number, after the weights."""

    data: dict[str, Json]
    constants: list[torch.Tensor]


# --- writing


def write_graph(
    graph_module: fx.GraphModule, constants_from: int, ranges: Mapping[Any, Any] | None = None
) -> GraphFile:
    """Return the written form of a graph whose STATIC inputs are weights 0, 1, ... in their order.

    constants_from: the number of the first constant, which is the number of weights.
    ranges: the range of each symbol whose range differs from the one that the fakes have (torch.export's).
    Raises CodecError where a part of it has no written form.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    mode = mode_of(map(fake, placeholders))
    symbols = dict.fromkeys(symbol for node in placeholders for symbol in symbols_of(fake(node)))
    names = {symbol: f"s{index}" for index, symbol in enumerate(symbols)}
    try:
        weights = count()
        inputs = [_write_input(node, weights, names) for node in placeholders]
        conditions = [str(condition) for condition in conditions_of(mode, names)]
    except SizeTextError as cause:
        raise CodecError(f"a size: {cause}") from cause
    constants: list[torch.Tensor] = []
    nodes: list[Json] = []
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            nodes.append({"name": name_of(node.name), "constant": constants_from + len(constants)})
            constants.append(_constant(node, graph_module))
        elif node.op not in ("placeholder", "output"):
            nodes.append(_write_call(node))
    results: Any = graph_module.graph.output_node().args[0]
    data = {
        "ops": {name: registry()[name].version for name in sorted(_fused_ops(nodes))},
        "symbols": [_write_symbol(symbol, name, mode, ranges or {}) for symbol, name in names.items()],
        "conditions": conditions,
        "inputs": inputs,
        "nodes": nodes,
        "outputs": [encode(result) for result in results],
    }
    return GraphFile(data, constants)


def other_op_versions(data: Json) -> Iterator[tuple[str, int, int]]:
    """Yield (op, version in the file, version here) of each op of dlinfer's whose version differs. Version 0: it is
    not here. A file without versions has the first ones."""
    written = dict(data.get("ops") or {})
    for name in sorted(_fused_ops(data["nodes"])):
        version, here = written.get(name, 1), registry()[name].version if name in registry() else 0
        if version != here:
            yield name, version, here


def _fused_ops(nodes: Json) -> set[str]:
    """Names of dlinfer's fused ops among the calls of a written graph."""
    calls = (item.get("call") for item in nodes)
    return {call.removeprefix(_FUSED) for call in calls if isinstance(call, str) and call.startswith(_FUSED)}


def _write_symbol(symbol: Any, name: str, mode: FakeTensorMode, ranges: Mapping[Any, Any]) -> Json:
    low, high, hint = declared_range(symbol, mode, ranges)
    return {"name": name, "low": low, "high": high, "hint": hint}


def _write_input(node: fx.Node, weights: Iterator[int], names: Mapping[Any, str]) -> Json:
    value = fake(node)
    written: dict[str, Json] = {"name": name_of(node.name)}
    if node.meta.get(STATIC):
        return written | {"weight": next(weights)}
    if isinstance(value, torch.SymInt):
        return written | {"number": _write_size(value, names)}
    if not isinstance(value, torch.Tensor):
        return written | {"fixed": encode(value)}
    written |= {"dtype": short_name(value.dtype), "device": str(value.device)}
    written["sizes"] = [_write_size(size, names) for size in value.shape]
    if not is_contiguous(value):
        written["strides"] = [_write_size(stride, names) for stride in value.stride()]
    return written


def _write_size(number: int | torch.SymInt, names: Mapping[Any, str]) -> int | str:
    return number if isinstance(number, int) else str(to_size(number, names))


def _constant(node: fx.Node, graph_module: fx.GraphModule) -> torch.Tensor:
    value = attribute(graph_module, str(node.target))
    if type(value) is not torch.Tensor:
        raise CodecError(f"node {node.name} is a {type(value).__name__}")
    return value


def _write_call(node: fx.Node) -> Json:
    if reshapes_argument(node):  # on reading, its argument would have these sizes from the start
        raise CodecError(f"node {node.name} gives a tensor other sizes in place")
    if _reads_by_address(node):
        raise CodecError(
            f"node {node.name} reads an input by a place in its memory, which is another one later"
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


def _reads_by_address(node: fx.Node) -> bool:
    """Whether a node reads an input by its place in memory: another run's input, or a weight in a file, lies
    elsewhere in its own memory."""
    placed = placed_memory(node)
    return bool(placed) and any(
        storages(placeholder) & placed for placeholder in node.graph.find_nodes(op="placeholder")
    )


# --- reading


@dataclass
class ReadGraph:
    """A graph read from its written form.

    captured: the graph with its inputs' fakes, in a fake mode of its own. symbols: the value of each symbol there.
    inputs: the written inputs. conditions: what must be true of the sizes at each call.
    writes: numbers of weights and constants that the graph writes.
    """

    captured: Captured
    symbols: dict[str, torch.SymInt]
    inputs: list[dict[str, Json]]
    conditions: list[Size]
    writes: frozenset[int]


def read_graph(
    data: Json,
    weights: Sequence[Layout],
    constants: Mapping[int, torch.Tensor],
    allowed: Collection[str] = (),
) -> ReadGraph:
    """Return the graph that ``write_graph`` wrote. Every op is tried on fake tensors.

    weights: how weights and constants lie, by their number; constants: those that nodes name.
    allowed: names of trusted ops outside torch's and dlinfer's own namespaces.
    Raises CodecError where the data is not such a graph or does not fit the weights.
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
        for number, item in enumerate(_list(self.data["symbols"])):
            self.symbols[name_of(item["name"])] = self.new_symbol(number, item)
        names: dict[Any, str] = {plain_symbol(value): name for name, value in self.symbols.items()}
        conditions = {str(size): size for size in map(parse_condition, _list(self.data["conditions"]))}
        with torch.no_grad():
            for condition in conditions.values():
                torch._check(condition.evaluate(self.symbols))  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            for item in _list(self.data["inputs"]):
                self.add_input(item)
            for item in _list(self.data["nodes"]):
                self.add_node(item)
        outputs = self.arguments(self.data["outputs"])
        if not all(value is None or isinstance(value, (fx.Node, bool, int, float, str)) for value in outputs):
            raise CodecError("an output that is neither a node nor a plain value")
        self.graph.output(outputs)
        conditions |= {str(size): size for size in conditions_of(self.mode, names)}
        effects = effects_of(self.graph)
        fakes = tuple(fake(node) for node in self.graph.find_nodes(op="placeholder"))
        return ReadGraph(
            Captured(fx.GraphModule(self.attributes, self.graph, "graph"), fakes, self.mode),
            self.symbols,
            list(self.data["inputs"]),
            list(conditions.values()),
            frozenset(number for node, number in self.weight_numbers.items() if effects.is_written(node)),
        )

    def new_symbol(self, number: int, item: Json) -> torch.SymInt:
        low, high, hint = item["low"], item["high"], item["hint"]
        if type(low) is not int or not all(type(limit) in (int, type(None)) for limit in (high, hint)):
            raise CodecError("a range that is not of integers")
        if low < 0 or (high is not None and high <= low) or (hint is not None and not low <= hint):
            raise CodecError(f"a range from {low} to {high}")
        if hint is not None and high is not None and hint > high:
            raise CodecError(f"an example {hint} beyond {high}")
        return new_symbol(self.mode, number, low, high, hint)

    def sizes(self, texts: Json) -> list[Any]:
        return [parse_size(text).evaluate(self.symbols) for text in _list(texts)]

    def add_input(self, item: Json) -> None:
        name = name_of(item["name"])
        node = self.add(name, lambda: self.graph.placeholder(name))
        if "weight" in item:
            node.meta |= {STATIC: True, "val": self.weight(node, item["weight"])}
        elif "number" in item:
            node.meta["val"] = self.sizes([item["number"]])[0]
        elif "fixed" in item:
            node.meta["val"] = decode(item["fixed"], {})
        else:
            sizes, strides = self.sizes(item["sizes"]), item.get("strides")
            dtype, device = dtype_of(item["dtype"]), device_of(item["device"])
            with self.mode:
                if strides is None:
                    node.meta["val"] = torch.empty(sizes, dtype=dtype, device=device)
                else:
                    strides = self.sizes(strides)
                    node.meta["val"] = torch.empty_strided(sizes, strides, dtype=dtype, device=device)

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
            node = self.add(name, lambda: self.graph.create_node("get_attr", f"_{name}", name=name))
            node.meta["val"] = self.weight(node, item["constant"])
            self.attributes[f"_{name}"] = self.constants[item["constant"]]
            return
        function = resolve_call(item["call"], self.allowed)
        args = self.arguments(item["args"])
        kwargs = {
            key: decode(value, self.references) for key, value in dict(item.get("kwargs") or {}).items()
        }
        node = self.add(
            name, lambda: self.graph.create_node("call_function", function, args, kwargs, name=name)
        )
        try:
            node.meta["val"] = fake_result(node, self.mode, check_call)
        except Exception as cause:  # an op's fake function may raise anything; the node's name is what helps
            raise CodecError(f"node {name}: {item['call']}: {first_line(cause)}") from cause
        node.meta["stack_trace"] = _stack_trace(item.get("line"))

    def add(self, name: str, create: Callable[[], fx.Node]) -> fx.Node:
        if name in self.nodes or len(self.nodes) >= _MOST_NODES:
            raise CodecError(f"two nodes are called {name}")
        node = self.nodes[name] = create()
        if node.name != name:
            raise CodecError(f"{name} is a word of Python")
        return node

    def arguments(self, items: Json) -> tuple[Any, ...]:
        return tuple(decode(item, self.references) for item in _list(items))

    @property
    def references(self) -> Mapping[str, Callable[[str], object]]:
        return {"node": self.node}

    def node(self, name: str) -> fx.Node:
        if name not in self.nodes:
            raise CodecError(f"node {name[:80]!r} is not there, or comes later")
        return self.nodes[name]


def _list(data: Json) -> list[Json]:
    if not is_list(data):
        raise CodecError("a list is missing")
    return data


def _stack_trace(line: Json) -> str:
    """A stack trace that ``model_line`` reads as this line."""
    if not isinstance(line, str) or any(sign in line for sign in '\n\r"') or len(line) > 500:
        return ""
    path, colon, rest = line.partition(":")
    return f'  File "{path}", line {rest}' if colon else ""
