"""Let a graph serve sizes 0 and 1, although torch.export traces with every dynamic size at 2 or more.

torch.export declares the user's whole range of sizes valid, even if the range starts at 0 or 1. But a model may behave
differently at size 1 (``if x.shape[0] == 1``, ``squeeze``). So this module runs the captured graph at sizes 0 and 1, op
by op. The result of each op must have the sizes of its fake. The outputs, and the tensors that the graph writes, must
equal those of the original module.
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
from dlinfer.graph.torch_private.expressions import Expression, SizeTextError, to_size
from dlinfer.graph.torch_private.fake_mode import strict_mode
from dlinfer.graph.torch_private.symbol_guards import conditions_of
from dlinfer.graph.torch_private.symbols import declared_range, new_symbol, plain_symbol, symbols_of
from dlinfer.utils.closeness import difference


def from_one_on(exported: Exported) -> Exported:
    """Re-trace the graph with unbacked symbols if a size may be 0 or 1, so that torch specializes on neither value.

    If the module and examples are known, test runs at sizes 0 and 1 come first. If the test run of a dimension at size
    0 or 1 fails, the dimension's range begins at 1 or 2. A graph that cannot be re-traced is returned unchanged. Raises
    CaptureError if a declared minimum is 1 and the module behaves differently at size 1.
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
                    reason=(
                        "at size 1 the module computes something else than the graph that torch.export captured "
                        "for sizes of 2 and more, so one graph cannot serve both"
                    ),
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
    captured: Captured, declared: Mapping[Expression, tuple[int, int | None, int | None]]
) -> Captured:
    """Re-trace a graph with new symbols. The guards on the old symbols become guards on the new ones.

    declared: old symbol -> its lowest value, its highest value and a hint.
    Raises RetraceError, and SizeTextError for a size that cannot be written as an expression of the symbols.
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
            if is_contiguous(value):  # torch computes the strides; it counts a size that may be 0 as 1
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
    """Runs a captured graph and its module at given sizes, and compares their results."""

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
        # Threads share the random generator, so graphs that draw no random numbers must not touch it.
        self._draws = any(map(is_random, graph.nodes))
        try:
            self._conditions = conditions_of(captured.mode, self.names)
        except SizeTextError:
            self._conditions = []  # without them, a forbidden size just fails in its test run

    def lowest(self, lows: Mapping[Expression, int]) -> dict[Expression, int]:
        """Return symbol -> the lowest size that the graph serves correctly.

        lows: symbol -> its declared minimum, 0 or 1. This minimum is raised to 1 if a test run at size 0 failed, and to
            2 if a test run at size 1 failed.
        """
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
        """Return each symbol's value in the example inputs, by the symbol's name."""
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
        """Call ``run`` with the weights and with copies of ``inputs``. Weights that the graph writes are copied too.

        Return the outputs, the inputs after the run, and the written weights; None if the run fails.
        """
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
        """Return ``example`` with rows repeated or dropped, so that it has the sizes of the fake ``value``.

        values: the value of each symbol. A symbolic number becomes an integer.
        """
        if not isinstance(example, torch.Tensor) or not isinstance(value, torch.Tensor):
            return self.size(value, values) if isinstance(value, torch.SymInt) else example
        for dim, size in enumerate(value.shape):
            expected = self.size(size, values)
            if expected is not None and expected != example.shape[dim]:
                example = example.index_select(dim, torch.arange(expected) % max(1, example.shape[dim]))
        return example

    def size(self, size: int | torch.SymInt, values: Mapping[str, int]) -> int | None:
        """Return a fake's size for these values of the symbols; None if the size depends on data."""
        try:
            return to_size(size, self.names).evaluate(values)
        except SizeTextError:
            return None


def _numbers(value: object) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else (value,)


def _same(result: object, expected: object) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(result, torch.Tensor):
        return type(result) is type(expected) and bool(result == expected)
    # Both run torch's kernels on the same numbers, so a difference above rounding means another computation.
    bound = 1e-3 if result.dtype.itemsize >= 4 else 5e-2
    return difference([result], [expected], rtol=bound, atol=bound) is None


class _Sized(fx.Interpreter):
    """Runs the graph, and raises ValueError if the sizes of a result differ from those of its fake."""

    def __init__(self, trial: _Trial, values: Mapping[str, int]) -> None:
        super().__init__(trial.graph_module)
        self._trial, self._values = trial, values

    def run_node(self, n: fx.Node) -> object:
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
