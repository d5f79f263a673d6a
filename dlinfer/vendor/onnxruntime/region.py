"""A compiled region: its model, and its session, made when its weights are known and anew when they change."""

from collections.abc import Sequence
from typing import Any

import torch

from dlinfer.graph.engine_kit.eager_region import eager_program, leave_for_a_call
from dlinfer.graph.engine_kit.held_weights import HeldWeights
from dlinfer.graph.engine_kit.output_sizes import reader, sizes_of
from dlinfer.graph.functional.function import Function, function_of
from dlinfer.graph.ir.dialect import STATIC, fake
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.onnx.export import export
from dlinfer.graph.options import CompileOptions
from dlinfer.vendor.onnxruntime import sessions
from dlinfer.vendor.onnxruntime.contrib import OPSET, table
from dlinfer.vendor.onnxruntime.feeds import fed
from dlinfer.vendor.onnxruntime.model import safe_in_place, with_initialisers
from dlinfer.vendor.onnxruntime.options import OrtOptions
from dlinfer.vendor.onnxruntime.run import Conflict, Io, SessionRun


class Region:
    """Callable with the region's inputs. Threads may call it at once.

    source: the model as text.

    Making one raises NotAFunctionError, NotExportableError, UnknownSizeError, SessionRefusedError,
    ProviderUnavailableError and ProviderFallbackError; where weights are built in, so does a call that finds them new
    or changed.
    """

    def __init__(
        self, region: Subgraph, options: CompileOptions, chosen: OrtOptions, notes: list[str]
    ) -> None:
        self._region = region
        self._options = options
        self._chosen = chosen
        self._notes = notes
        self._function = function = function_of(region)
        self._steady = _steady(function)
        graph_module, self._feeds = fed(function.graph_module, self._steady)
        self._graph = graph = export(graph_module, opset=OPSET, translations=table)
        self.source = str(graph)
        self._in_place = safe_in_place(graph, self._feeds, function.writes) & function.in_place
        results: Sequence[Any] = function.graph_module.graph.output_node().args[0]  # pyright: ignore[reportAssignmentType]
        inputs = [fake(node) for node in function.graph_module.graph.find_nodes(op="placeholder")]
        self._sizes = reader(sizes_of([fake(node).shape for node in results], inputs))
        self._dtypes = [fake(node).dtype for node in results]
        self._eager: Any = None
        self._run = self._runner()

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        try:
            return self._run(*inputs)
        except Conflict as conflict:
            return self._by_torch(str(conflict), inputs)

    def _runner(self) -> Any:
        if not self._graph.outputs:
            return lambda *inputs: self._function.finish(inputs, [])  # views only
        model = self._graph.to_bytes()
        if not self._chosen.holds_weights:
            session = sessions.make_session(model, self._chosen, policy=self._options.policy)
            return self._session_run(session, frozenset())
        refused = sessions.why_refused(model)
        if refused is not None:
            raise sessions.SessionRefusedError(refused)
        names = [node.name for node in self._function.graph_module.graph.find_nodes(op="placeholder")]
        return HeldWeights(sorted(self._steady), names, self._built, self._notes)

    def _built(self, weights: tuple[torch.Tensor, ...]) -> SessionRun:
        """A session with these weights in it."""
        inputs = dict(zip(sorted(self._steady), weights, strict=True))
        held = {
            name: feed.of(inputs).contiguous()  # pyright: ignore[reportArgumentType]
            for name, feed in zip(self._graph.inputs, self._feeds, strict=True)
            if feed.index in self._steady
        }
        model = with_initialisers(self._graph, list(held))
        session = sessions.make_session(model, self._chosen, policy=self._options.policy, weights=held)
        return self._session_run(session, self._steady)

    def _session_run(self, session: Any, held: frozenset[int]) -> SessionRun:
        named = zip(self._graph.inputs, self._feeds, strict=True)
        feeds = [(name, feed) for name, feed in named if feed.index not in held]
        io = Io(feeds, self._graph.outputs, self._dtypes, self._sizes, self._in_place, self._steady)
        return SessionRun(session, self._function, io)

    def _by_torch(self, reason: str, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A call whose inputs share memory that is written, which values cannot say."""
        leave_for_a_call(self._region, sessions.ENGINE, reason, self._options.policy)
        if self._eager is None:
            self._eager = eager_program(self._region)
            self._notes.append(f"ran by torch at a call: {reason}")
        return self._eager(*inputs)


def _steady(function: Function) -> frozenset[int]:
    placeholders = function.graph_module.graph.find_nodes(op="placeholder")
    written = set(function.writes)
    return frozenset(
        index for index, node in enumerate(placeholders) if node.meta.get(STATIC) and index not in written
    )
