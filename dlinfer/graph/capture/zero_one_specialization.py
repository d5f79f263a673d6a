"""Serve sizes 0 and 1, which torch.export never traces.

torch.export traces with every dynamic size at 2 or more, and then declares the whole range. A model may behave
differently at size 1 (``if x.shape[0] == 1``, ``squeeze``). So the captured graph runs at these sizes, op by op: each
result must have the sizes of its fake, and outputs and writes must equal the module's.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.random import fork_rng  # pyright: ignore[reportUnknownVariableType] - it declares no devices
from torch.utils._pytree import tree_leaves

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.export import Exported, Reference
from dlinfer.graph.capture.retrace import RetraceError, retrace
from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.ir.dialect import STATIC, fake, is_random
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.torch_private.expressions import SizeTextError, to_size
from dlinfer.graph.torch_private.fake_mode import strict_mode
from dlinfer.graph.torch_private.symbol_guards import conditions_of
from dlinfer.graph.torch_private.symbols import declared_range, new_symbol, plain_symbol, symbols_of
from dlinfer.utils.closeness import difference


def from_one_on(exported: Exported) -> Exported:
    """Re-trace with an unbacked symbol for every size that may be 0 or 1, so that neither value is specialized.

    A size stays in the range only if a test run succeeded at it. A graph that depends on sizes of 2 or more keeps its
    range from 2 on. Raises CaptureError where the range names size 1 and the module behaves differently there.
    """
    captured = exported.captured
    symbols = dict.fromkeys(symbol for value in captured.fakes for symbol in symbols_of(value))
    declared = {symbol: declared_range(symbol, captured.mode, exported.ranges) for symbol in symbols}
    lows = {symbol: low for symbol, (low, _, _) in declared.items() if low < 2}
    if not lows:
        return exported
    if exported.reference is not None and exported.examples is not None:
        for symbol, low in _Trial(exported, exported.examples, exported.reference).lowest(lows).items():
            if lows[symbol] == 1 and low > 1:
                raise CaptureError(
                    reason="at a size of 1 the module gives something else than what torch.export captured for 2 "
                    "and more, so one graph cannot serve both",
                    line=f"dynamic_shapes with min=1 for {_places(captured, symbol)}",
                )
            declared[symbol] = (low, *declared[symbol][1:])
    try:
        return replace(exported, captured=_over_new_symbols(captured, declared), ranges={})
    except (RetraceError, SizeTextError):
        return exported


def _places(captured: Captured, symbol: object) -> str:
    return ", ".join(
        f"{node.name}.shape[{dim}]"
        for node in captured.graph_module.graph.find_nodes(op="placeholder")
        if isinstance(fake(node), torch.Tensor)
        for dim, size in enumerate(fake(node).shape)
        if plain_symbol(size) == symbol
    )


def _over_new_symbols(
    captured: Captured, declared: Mapping[Any, tuple[int, int | None, int | None]]
) -> Captured:
    """Re-trace with new symbols. declared: the lowest value, the highest and a hint of each old symbol.

    The new symbols get the guards of the old ones. Raises RetraceError, and SizeTextError for a size that cannot be
    told over the symbols.
    """
    mode = strict_mode()
    names = {symbol: f"s{number}" for number, symbol in enumerate(declared)}
    values = {
        names[symbol]: new_symbol(mode, number, *limits)
        for number, (symbol, limits) in enumerate(declared.items())
    }

    def renewed_size(size: int | torch.SymInt) -> int | torch.SymInt:
        return to_size(size, names).evaluate(values) if isinstance(size, torch.SymInt) else size

    def renewed(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return renewed_size(value) if isinstance(value, torch.SymInt) else value
        sizes = [renewed_size(size) for size in value.shape]
        with mode:
            if is_contiguous(value):  # torch's own strides, which count a size that may be 0 as 1
                return torch.empty(sizes, dtype=value.dtype, device=value.device)
            strides = [renewed_size(stride) for stride in value.stride()]
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    for condition in conditions_of(captured.mode, names):
        # torch documents this function in spite of its name.
        torch._check(condition.evaluate(values))  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    inputs = {node: renewed(fake(node)) for node in placeholders}
    return Captured(retrace(captured.graph_module, inputs, mode), tuple(inputs.values()), mode)


class _Trial:
    """Runs of a captured graph and its module at given sizes."""

    def __init__(self, exported: Exported, examples: Sequence[object], reference: Reference) -> None:
        captured = exported.captured
        self.graph_module = captured.graph_module
        self.names = {symbol: str(symbol) for value in captured.fakes for symbol in symbols_of(value)}
        self._examples, self._weights, self._reference = examples, exported.weights, reference
        graph = captured.graph_module.graph
        placeholders = graph.find_nodes(op="placeholder")
        self._fakes = [fake(node) for node in placeholders if not node.meta.get(STATIC)]
        effects = effects_of(graph)
        static = [node for node in placeholders if node.meta.get(STATIC)]
        self._written = [index for index, node in enumerate(static) if effects.is_written(node)]
        # A graph that draws no random numbers leaves the generator alone, which threads share.
        self._draws = any(map(is_random, graph.nodes))
        try:
            self._conditions = conditions_of(captured.mode, self.names)
        except SizeTextError:
            self._conditions = []  # a size that one of them forbids fails its trial by itself

    def lowest(self, lows: Mapping[Any, int]) -> dict[Any, int]:
        """The minimum of each symbol: as declared, or 1 or 2 where a test failed."""
        served = dict(lows)
        usual = self._usual()
        for size in (1, 0):
            small = [symbol for symbol, low in served.items() if low <= size]
            for chosen in [[symbol] for symbol in small] + ([small] if len(small) > 1 else []):
                values = usual | dict.fromkeys((self.names[symbol] for symbol in chosen), size)
                if not all(served[symbol] <= size for symbol in chosen) or not self._allowed(values):
                    continue
                if not self._succeeds(values):
                    served |= dict.fromkeys(chosen, size + 1)
        return served

    def _usual(self) -> dict[str, int]:
        """The sizes of the examples."""
        values: dict[str, int] = {}
        for pair in zip(self._fakes, self._examples, strict=True):
            for fake_size, size in zip(*map(_numbers, pair), strict=True):
                if (symbol := plain_symbol(fake_size)) in self.names:
                    values[self.names[symbol]] = size
        return values

    def _allowed(self, values: Mapping[str, int]) -> bool:
        try:
            return all(condition.evaluate(values) for condition in self._conditions)
        except (KeyError, ZeroDivisionError):
            return False

    def _succeeds(self, values: Mapping[str, int]) -> bool:
        inputs = [
            self._resized(value, example, values)
            for value, example in zip(self._fakes, self._examples, strict=True)
        ]
        # torch declares ``devices`` as a bare iterable.
        with torch.no_grad(), fork_rng(devices=[], enabled=self._draws):
            expected = self._outcome(inputs, self._reference)
            results = self._outcome(
                inputs, lambda weights, leaves: _Sized(self, values).run(*weights, *leaves)
            )
        if expected is None or results is None:
            return False
        return all(itertools.starmap(_same, zip(results, expected, strict=True)))

    def _outcome(self, inputs: Sequence[object], run: Reference) -> list[object] | None:
        """Outputs and written tensors of a run, which writes into copies; None where it fails."""
        weights = [w.clone() if index in self._written else w for index, w in enumerate(self._weights)]
        leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs]
        if self._draws:
            torch.default_generator.manual_seed(0)
        try:
            outputs = list(run(weights, leaves))
        except Exception:  # noqa: BLE001 - a module may refuse a size in any way; then the size is not served
            return None
        return [*outputs, *leaves, *(weights[index] for index in self._written)]

    def _resized(self, value: object, example: object, values: Mapping[str, int]) -> object:
        """The example, with rows repeated or dropped to match these sizes of its fake."""
        if not isinstance(example, torch.Tensor) or not isinstance(value, torch.Tensor):
            return self.size(value, values) if isinstance(value, torch.SymInt) else example
        for dim, size in enumerate(value.shape):
            expected = self.size(size, values)
            if expected is not None and expected != example.shape[dim]:
                example = example.index_select(dim, torch.arange(expected) % max(1, example.shape[dim]))
        return example

    def size(self, size: int | torch.SymInt, values: Mapping[str, int]) -> int | None:
        """A fake's size for these values of the symbols; None where it depends on data."""
        try:
            return to_size(size, self.names).evaluate(values)
        except SizeTextError:
            return None


def _numbers(value: object) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else (value,)


def _same(result: object, expected: object) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(result, torch.Tensor):
        return type(result) is type(expected) and bool(result == expected)
    # Both run torch's kernels on the same numbers: more than rounding is another computation.
    bound = 1e-3 if result.dtype.itemsize >= 4 else 5e-2
    return difference([result], [expected], rtol=bound, atol=bound) is None


class _Sized(fx.Interpreter):
    """Runs the graph and compares the sizes of each result with its fake."""

    def __init__(self, trial: _Trial, values: Mapping[str, int]) -> None:
        super().__init__(trial.graph_module)
        self._trial, self._values = trial, values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            for known, value in zip(tree_leaves(fake(n)), tree_leaves(result), strict=True):
                if isinstance(known, torch.Tensor) and not self._fits(known, value):
                    raise ValueError(f"{n.name} has sizes {tuple(value.shape)}, not {tuple(known.shape)}")
        return result

    def _fits(self, known: torch.Tensor, real: torch.Tensor) -> bool:
        if known.dim() != real.dim():
            return False
        return not set(symbols_of(known)) <= set(self._trial.names) or all(
            self._trial.size(size, self._values) in (None, real_size)
            for size, real_size in zip(known.shape, real.shape, strict=True)
        )
