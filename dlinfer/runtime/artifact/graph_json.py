"""A graph in the dialect as JSON, and back: inputs, nodes, outputs, and what holds of the sizes.

Written are the inputs' dtypes and sizes and what each node calls; what the nodes give is not. Reading runs every op
on fakes, so that sizes, dtypes and strides inside are torch's own findings, whatever a file says: compiled loops read
memory by them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dlinfer.graph.capture.retrace import fake_result
from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.ir.dialect import (
    STATIC,
    fake,
    model_line,
    placed_memory,
    reshapes_argument,
    storages,
)
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.ir.program import attribute
from dlinfer.graph.torch_private.expressions import to_size
from dlinfer.graph.torch_private.fake_mode import FakeTensorMode, mode_of, strict_mode
from dlinfer.graph.torch_private.guards import conditions_of
from dlinfer.graph.torch_private.symbols import declared_range, new_symbol, symbols_of
from dlinfer.ops.core.spec import NAMESPACE, registry
from dlinfer.runtime.artifact.node_json import (
    GraphTextError,
    call_text,
    check_call,
    decode,
    device_of,
    dtype_of,
    encode,
    name_of,
    resolve_call,
)
from dlinfer.utils.size_text import Size, SizeTextError, parse_condition, parse_size

_MOST_NODES = 1_000_000
_FUSED = f"{NAMESPACE}::"


@dataclass(frozen=True)
class Layout:
    """What a weight is on the outside: how it must lie for the graph that takes it."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device)


@dataclass(frozen=True)
class GraphFile:
    """A graph in its written form. constants: the tensors that its nodes name by number, after the weights."""

    data: dict[str, Any]
    constants: list[torch.Tensor] = field(default_factory=list)


# --- writing


def write_graph(
    graph_module: fx.GraphModule, constants_from: int, ranges: Mapping[Any, Any] | None = None
) -> GraphFile:
    """Return the written form of a graph whose STATIC inputs are weights 0, 1, ... in their order.

    constants_from: the number of the first constant, as many as there are weights.
    ranges: what sizes may be, by symbol, where it is not what the graph's own world says (torch.export's).
    Raises GraphTextError where a part of it has no written form.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    mode = mode_of(map(fake, placeholders))
    symbols = dict.fromkeys(symbol for node in placeholders for symbol in symbols_of(fake(node)))
    names = {symbol: f"s{index}" for index, symbol in enumerate(symbols)}
    try:
        weights = iter(range(constants_from))
        inputs = [_write_input(node, weights, names) for node in placeholders]
        conditions = [str(one) for one in conditions_of(mode, names)]
    except SizeTextError as cause:
        raise GraphTextError(f"a size: {cause}") from cause
    constants: list[torch.Tensor] = []
    nodes = [
        _write_node(node, graph_module, constants, constants_from)
        for node in graph_module.graph.nodes
        if node.op not in ("placeholder", "output")
    ]
    table = [
        dict(
            zip(
                ("name", "low", "high", "hint"), (name, *declared_range(one, mode, ranges or {})), strict=True
            )
        )
        for one, name in names.items()
    ]
    outputs = encode(tuple(graph_module.graph.output_node().args[0]))["tuple"]  # pyright: ignore[reportArgumentType]
    data = {
        "ops": {name: registry()[name].version for name in sorted(_ops_of(nodes))},
        "symbols": table,
        "conditions": conditions,
        "inputs": inputs,
        "nodes": nodes,
        "outputs": outputs,
    }
    return GraphFile(data, constants)


def strangers(data: Any) -> Iterator[tuple[str, int, int]]:
    """(op, version that a written graph is of, version here; 0 where it is not here) of dlinfer's ops that differ.

    A graph that says nothing of versions is of the first ones.
    """
    written = dict(data.get("ops") or {})
    for name in sorted(_ops_of(data["nodes"])):
        version, here = written.get(name, 1), registry()[name].version if name in registry() else 0
        if version != here:
            yield name, version, here


def _ops_of(nodes: Any) -> set[str]:
    """Names of dlinfer's fused ops among the calls of a written graph."""
    calls = (item.get("call") for item in nodes)
    return {call.removeprefix(_FUSED) for call in calls if isinstance(call, str) and call.startswith(_FUSED)}


def _write_input(node: fx.Node, weights: Iterator[int], names: Mapping[Any, str]) -> dict[str, Any]:
    value = fake(node)
    written: dict[str, Any] = {"name": name_of(node.name)}
    if node.meta.get(STATIC):
        return written | {"weight": next(weights)}
    if isinstance(value, torch.SymInt):
        return written | {"number": _text(value, names)}
    if not isinstance(value, torch.Tensor):
        return written | {"fixed": encode(value)}
    written |= {"dtype": str(value.dtype).removeprefix("torch."), "device": str(value.device)}
    written["sizes"] = [_text(size, names) for size in value.shape]
    if not is_contiguous(value):
        written["strides"] = [_text(stride, names) for stride in value.stride()]
    return written


def _text(number: int | torch.SymInt, names: Mapping[Any, str]) -> int | str:
    return number if isinstance(number, int) else str(to_size(number, names))


def _write_node(
    node: fx.Node, graph_module: fx.GraphModule, constants: list[torch.Tensor], constants_from: int
) -> dict[str, Any]:
    written: dict[str, Any] = {"name": name_of(node.name)}
    if node.op == "get_attr":
        value = attribute(graph_module, str(node.target))
        if type(value) is not torch.Tensor:
            raise GraphTextError(f"node {node.name} is a {type(value).__name__}")
        constants.append(value)
        return written | {"constant": constants_from + len(constants) - 1}
    if reshapes_argument(node):  # reading would give its argument these sizes from the start
        raise GraphTextError(f"node {node.name} gives a tensor other sizes in place")
    if _reads_a_place(node):
        raise GraphTextError(
            f"node {node.name} reads an input by a place in its memory, which is another one later"
        )
    try:
        written |= {"call": call_text(node.target), "args": encode(tuple(node.args))["tuple"]}
        if node.kwargs:
            written["kwargs"] = {key: encode(value) for key, value in node.kwargs.items()}
    except GraphTextError as cause:
        raise GraphTextError(f"node {node.name}: {cause}") from cause
    line = _shortened(model_line(node))
    return written | {"line": line} if line else written


def _reads_a_place(node: fx.Node) -> bool:
    """Whether a node looks at an input by a place in its memory: an input of another run, or a weight in a file, lies
    elsewhere in its own."""
    placed = placed_memory(node)
    return bool(placed) and any(storages(one) & placed for one in node.graph.find_nodes(op="placeholder"))


def _shortened(line: str) -> str:
    """A model's line without the folders of the machine that the artifact was made on."""
    path, colon, rest = line.partition(":")
    return "/".join(path.split("/")[-3:]) + colon + rest


# --- reading


@dataclass
class ReadGraph:
    """A graph read from its written form.

    captured: the graph with its inputs' fakes, in a world of its own. symbols: the value of each symbol there.
    inputs: the written inputs. conditions: what must be true of the sizes at each call.
    writes: numbers of weights and constants that the graph writes.
    """

    captured: Captured
    symbols: dict[str, torch.SymInt]
    inputs: list[dict[str, Any]]
    conditions: list[Size]
    writes: frozenset[int]


def read_graph(
    data: Any,
    weights: Sequence[Layout],
    constants: Mapping[int, torch.Tensor],
    allowed: Collection[str] = (),
) -> ReadGraph:
    """Return the graph that ``write_graph`` wrote, every op tried on fakes.

    weights: how weights and constants lie, by their number; constants: those that nodes name.
    allowed: names of ops outside torch's and dlinfer's own namespaces that are trusted.
    Raises GraphTextError where the data is not such a graph or does not fit the weights.
    """
    try:
        return _Reader(data, weights, constants, allowed).read()
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
    ) as cause:
        # Data of another form than ours raises these, and so do the ops' own checks.
        raise GraphTextError(_first_line(cause)) from cause


def _first_line(cause: Exception) -> str:
    text = str(cause).strip().splitlines()
    return text[0][:300] if text and isinstance(cause, ValueError) else f"{type(cause).__name__}: {text[:1]}"


class _Reader:
    def __init__(
        self,
        data: Any,
        weights: Sequence[Layout],
        constants: Mapping[int, torch.Tensor],
        allowed: Collection[str],
    ) -> None:
        self.data = data
        self.weights = weights
        self.constants = constants
        self.allowed = allowed
        self.mode: FakeTensorMode = strict_mode()
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.symbols: dict[str, torch.SymInt] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.number_of: dict[fx.Node, int] = {}

    def read(self) -> ReadGraph:
        for number, item in enumerate(_listed(self.data["symbols"])):
            self.symbols[name_of(item["name"])] = self.symbol(number, item)
        names = {value.node.expr: name for name, value in self.symbols.items()}
        conditions = {str(one): one for one in map(parse_condition, _listed(self.data["conditions"]))}
        with torch.no_grad():
            for condition in conditions.values():
                torch._check(condition.evaluate(self.symbols))
            for item in _listed(self.data["inputs"]):
                self.add_input(item)
            for item in _listed(self.data["nodes"]):
                self.add_node(item)
        outputs = tuple(decode(item, self.nodes) for item in _listed(self.data["outputs"]))
        if not all(one is None or isinstance(one, (fx.Node, bool, int, float, str)) for one in outputs):
            raise GraphTextError("an output that is neither a node nor a plain value")
        self.graph.output(outputs)
        conditions |= {str(one): one for one in conditions_of(self.mode, names)}
        graph_module = fx.GraphModule(self.held, self.graph, "graph")
        fakes = tuple(fake(node) for node in self.graph.find_nodes(op="placeholder"))
        return ReadGraph(
            Captured(graph_module, fakes, self.mode),
            self.symbols,
            list(self.data["inputs"]),
            list(conditions.values()),
            self.writes(),
        )

    def symbol(self, number: int, item: Any) -> torch.SymInt:
        low, high, hint = item["low"], item["high"], item["hint"]
        if not all(type(one) is int for one in (low, high, hint) if one is not None) or type(low) is not int:
            raise GraphTextError("a range that is not of integers")
        if low < 0 or (high is not None and high <= low) or (hint is not None and not low <= hint):
            raise GraphTextError(f"a range from {low} to {high}")
        if hint is not None and high is not None and hint > high:
            raise GraphTextError(f"an example {hint} beyond {high}")
        return new_symbol(self.mode, number, low, high, hint)

    def size(self, text: Any) -> Any:
        return parse_size(text).evaluate(self.symbols)

    def add_input(self, item: Any) -> None:
        name = name_of(item["name"])
        node = self.new(name, lambda: self.graph.placeholder(name))
        if "weight" in item:
            node.meta[STATIC] = True
            self.number_of[node] = item["weight"]
            node.meta["val"] = self.weight(item["weight"])
        elif "number" in item:
            node.meta["val"] = self.size(item["number"])
        elif "fixed" in item:
            node.meta["val"] = decode(item["fixed"], {})
        else:
            sizes = [self.size(one) for one in _listed(item["sizes"])]
            kind = {"dtype": dtype_of(item["dtype"]), "device": device_of(item["device"])}
            with self.mode:
                if item.get("strides") is None:
                    node.meta["val"] = torch.empty(sizes, **kind)
                else:
                    strides = [self.size(one) for one in _listed(item["strides"])]
                    node.meta["val"] = torch.empty_strided(sizes, strides, **kind)

    def weight(self, number: Any) -> torch.Tensor:
        if type(number) is not int or not 0 <= number < len(self.weights):
            raise GraphTextError(f"there is no weight {number}")
        layout = self.weights[number]
        with self.mode:
            return torch.empty_strided(layout.sizes, layout.strides, dtype=layout.dtype, device=layout.device)

    def add_node(self, item: Any) -> None:
        name = name_of(item["name"])
        if "constant" in item:
            node = self.new(name, lambda: self.graph.create_node("get_attr", f"_{name}", name=name))
            node.meta["val"] = self.weight(item["constant"])
            self.number_of[node] = item["constant"]
            self.held[f"_{name}"] = self.constants[item["constant"]]
            return
        function = resolve_call(item["call"], self.allowed)
        args = tuple(decode(one, self.nodes) for one in _listed(item["args"]))
        kwargs = {key: decode(one, self.nodes) for key, one in dict(item.get("kwargs") or {}).items()}
        node = self.new(
            name, lambda: self.graph.create_node("call_function", function, args, kwargs, name=name)
        )
        try:
            node.meta["val"] = fake_result(node, self.mode, check_call)
        except (
            Exception
        ) as cause:  # whatever an op's fake function raises, the node that has it is what helps
            raise GraphTextError(f"node {name}: {item['call']}: {_first_line(cause)}") from cause
        node.meta["stack_trace"] = _trace(item.get("line"))

    def new(self, name: str, make: Any) -> fx.Node:
        if name in self.nodes or len(self.nodes) >= _MOST_NODES:
            raise GraphTextError(f"two nodes are called {name}")
        node = self.nodes[name] = make()
        if node.name != name:
            raise GraphTextError(f"{name} is a word of Python")
        return node

    def writes(self) -> frozenset[int]:
        """Return the numbers of weights and constants whose memory some node writes, through views too."""
        effects = effects_of(self.graph)
        return frozenset(number for node, number in self.number_of.items() if effects.is_written(node))


def _listed(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise GraphTextError("a list is missing")
    return data


def _trace(line: Any) -> str:
    """A stack trace that ``model_line`` reads as this line."""
    if not isinstance(line, str) or "\n" in line or "\r" in line or '"' in line or len(line) > 500:
        return ""
    path, colon, rest = line.partition(":")
    return f'  File "{path}", line {rest}' if colon else ""
