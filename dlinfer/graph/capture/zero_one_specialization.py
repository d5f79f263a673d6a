"""Tests an exported graph at sizes 0 and 1, which torch.export never traces.

torch.export traces with every dynamic size at 2 or more, and then declares the whole range. A model may behave
differently at size 1 (``if x.shape[0] == 1``, ``squeeze``). So the captured graph runs at these sizes, op by op: each
result must have the sizes of its fake, and outputs and writes must equal the module's.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import STATIC, fake, is_random
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.torch_private.expressions import Size, SizeTextError, to_size
from dlinfer.graph.torch_private.symbols import symbols_of
from dlinfer.utils.closeness import difference

Reference = Callable[[Sequence[torch.Tensor], Sequence[Any]], Sequence[Any]]
"""The module's outputs for weights (copies of those that it writes) and inputs."""


@dataclass(frozen=True)
class Trial:
    """A captured graph with the inputs to test it on.

    weights: values of STATIC inputs. examples: values of the other inputs. names: a name for each symbol.
    lows: the declared minimum of each symbol. conditions: guards on the sizes.
    """

    graph_module: fx.GraphModule
    weights: Sequence[torch.Tensor]
    examples: Sequence[Any]
    names: Mapping[Any, str]
    lows: Mapping[str, int]
    conditions: Sequence[Size]
    reference: Reference

    def lowest(self) -> dict[str, int]:
        """The minimum of each symbol: as declared, or 1 or 2 where a test failed."""
        served = dict(self.lows)
        usual = self._usual()
        for size in (1, 0):
            small = [name for name, low in served.items() if low <= size]
            for chosen in [[name] for name in small] + ([small] if len(small) > 1 else []):
                values = usual | dict.fromkeys(chosen, size)
                if not all(served[name] <= size for name in chosen) or not self._allowed(values):
                    continue
                if not self._succeeds(values):
                    served |= dict.fromkeys(chosen, size + 1)
        return served

    def _usual(self) -> dict[str, int]:
        """The sizes of the examples."""
        values = {}
        for node, example in zip(self._inputs(), self.examples, strict=True):
            for fake_size, size in zip(*map(_numbers, (fake(node), example)), strict=True):
                if isinstance(fake_size, torch.SymInt) and fake_size.node.expr in self.names:
                    values[self.names[fake_size.node.expr]] = size
        return values

    def _inputs(self) -> list[fx.Node]:
        return [n for n in self.graph_module.graph.find_nodes(op="placeholder") if not n.meta.get(STATIC)]

    def _allowed(self, values: Mapping[str, int]) -> bool:
        try:
            return all(condition.evaluate(values) for condition in self.conditions)
        except (KeyError, ZeroDivisionError):
            return False

    def _succeeds(self, values: Mapping[str, int]) -> bool:
        inputs = [
            self._resized(node, value, values)
            for node, value in zip(self._inputs(), self.examples, strict=True)
        ]
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=self._draws()):
            expected = self._outcome(inputs, self.reference)
            results = self._outcome(
                inputs, lambda weights, leaves: _Sized(self, values).run(*weights, *leaves)
            )
        return (
            expected is not None
            and results is not None
            and all(itertools.starmap(_same, zip(results, expected, strict=True)))
        )

    def _outcome(self, inputs: Sequence[object], run: Callable[..., Sequence[object]]) -> list[Any] | None:
        """Outputs and written tensors of a run, which writes into copies; None where it fails."""
        written = self._written()
        weights = [w.clone() if index in written else w for index, w in enumerate(self.weights)]
        leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs]
        if self._draws():
            torch.default_generator.manual_seed(0)
        try:
            outputs = list(run(weights, leaves))
        except Exception:  # noqa: BLE001 - a module may refuse a size in any way; then the size is not served
            return None
        return [*outputs, *leaves, *(weights[index] for index in sorted(written))]

    def _draws(self) -> bool:
        """Whether the graph draws random numbers. Otherwise the generator, which threads share, is not touched."""
        return any(map(is_random, self.graph_module.graph.nodes))

    def _written(self) -> set[int]:
        graph = self.graph_module.graph
        effects = effects_of(graph)
        static = [node for node in graph.find_nodes(op="placeholder") if node.meta.get(STATIC)]
        return {index for index, node in enumerate(static) if effects.is_written(node)}

    def _resized(self, node: fx.Node, example: object, values: Mapping[str, int]) -> Any:
        """The example, with rows repeated or dropped to match these sizes."""
        if not isinstance(example, torch.Tensor):
            return self._size(fake(node), values) if isinstance(fake(node), torch.SymInt) else example
        for dim, size in enumerate(fake(node).shape):
            expected = self._size(size, values)
            if expected is not None and expected != example.shape[dim]:
                example = example.index_select(dim, torch.arange(expected) % max(1, example.shape[dim]))
        return example

    def _size(self, size: Any, values: Mapping[str, int]) -> int | None:
        try:
            return to_size(size, self.names).evaluate(values)
        except SizeTextError:
            return None  # it depends on data


def _numbers(value: object) -> Iterator[Any]:
    return iter(value.shape) if isinstance(value, torch.Tensor) else iter((value,))


def _same(result: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(result, torch.Tensor):
        return type(result) is type(expected) and result == expected
    # Both run torch's kernels on the same numbers: more than rounding is another computation.
    bound = 1e-3 if result.dtype.itemsize >= 4 else 5e-2
    return difference([result], [expected], rtol=bound, atol=bound) is None


class _Sized(fx.Interpreter):
    """Runs the graph and compares the sizes of each result with its fake."""

    def __init__(self, trial: Trial, values: Mapping[str, int]) -> None:
        super().__init__(trial.graph_module)
        self.trial, self.values = trial, values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        known, real = fake(n), result
        if not isinstance(known, (tuple, list)):
            known, real = (known,), (result,)
        if n.op != "output":
            for known_result, value in zip(known, real, strict=True):
                if isinstance(known_result, torch.Tensor) and not self._fits(known_result, value):
                    raise ValueError(
                        f"{n.name} has sizes {tuple(value.shape)}, not {tuple(known_result.shape)}"
                    )
        return result

    def _fits(self, known: torch.Tensor, real: torch.Tensor) -> bool:
        if known.dim() != real.dim():
            return False
        unknown = set(symbols_of(known)) - set(self.trial.names)
        return bool(unknown) or all(
            self.trial._size(want, self.values) in (None, size)
            for want, size in zip(known.shape, real.shape, strict=True)
        )
