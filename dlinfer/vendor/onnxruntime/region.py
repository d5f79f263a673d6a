"""A compiled region: its session, made when its weights are known, and made anew when they change."""

from collections.abc import Sequence
from typing import Any

import torch

from dlinfer.graph.dialect import STATIC, fake
from dlinfer.graph.eager_region import eager_program, leave_for_a_call
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.held_weights import HeldWeights
from dlinfer.graph.onnx.export import OnnxGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.output_sizes import reader, sizes_of
from dlinfer.graph.values import Function
from dlinfer.vendor.onnxruntime import sessions
from dlinfer.vendor.onnxruntime.model import safe_in_place, with_initialisers
from dlinfer.vendor.onnxruntime.options import OrtOptions
from dlinfer.vendor.onnxruntime.run import Conflict, Io, SessionRun


class RegionRun:
    """Callable with the region's inputs. Threads may call it at once.

    source: the model as text. Raises SessionRefusedError, ProviderUnavailableError and ProviderFallbackError when it
    is made and, where weights are built in, at a call that finds them changed.
    """

    def __init__(
        self,
        region: Subgraph,
        function: Function,
        graph: OnnxGraph,
        chosen: OrtOptions,
        options: CompileOptions,
        notes: list[str],
    ) -> None:
        self.source = str(graph)
        self._region = region
        self._function = function
        self._graph = graph
        self._chosen = chosen
        self._options = options
        self._notes = notes
        self._eager: Any = None
        placeholders = function.graph_module.graph.find_nodes(op="placeholder")
        self._steady = frozenset(
            index
            for index, node in enumerate(placeholders)
            if node.meta.get(STATIC) and index not in function.writes
        )
        self._in_place = function.in_place & safe_in_place(graph, function.writes)
        results: Any = function.graph_module.graph.output_node().args[0]
        shapes = [fake(node).shape for node in results]
        self._sizes = reader(sizes_of(shapes, [fake(node) for node in placeholders]))
        if chosen.holds_weights:
            refused = sessions.why_refused(graph.to_bytes())
            if refused is not None:
                raise sessions.SessionRefusedError(refused)
            held = sorted(self._steady)
            self._run: Any = HeldWeights(held, graph.inputs, self._built, notes)
        else:
            session = sessions.make_session(graph.to_bytes(), chosen, policy=options.policy)
            self._run = self._session_run(session, frozenset())

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        try:
            return self._run(*inputs)
        except Conflict as conflict:
            return self._by_torch(str(conflict), inputs)

    def _built(self, weights: tuple[torch.Tensor, ...]) -> SessionRun:
        """A session with these weights in it."""
        held = sorted(self._steady)
        tensors = {
            self._graph.inputs[index]: tensor.contiguous()
            for index, tensor in zip(held, weights, strict=True)
        }
        model = with_initialisers(self._graph, list(tensors))
        session = sessions.make_session(model, self._chosen, policy=self._options.policy, weights=tensors)
        return self._session_run(session, self._steady)

    def _session_run(self, session: Any, held: frozenset[int]) -> SessionRun:
        inputs = [(index, name) for index, name in enumerate(self._graph.inputs) if index not in held]
        io = Io(inputs, self._graph.outputs, self._in_place, self._steady)
        return SessionRun(session, self._function, io, self._sizes)

    def _by_torch(self, reason: str, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A call whose inputs share memory that is written, which values cannot say."""
        leave_for_a_call(self._region, sessions.ENGINE, reason, self._options.policy)
        if self._eager is None:
            self._eager = eager_program(self._region)
            self._notes.append(f"ran by torch at a call: {reason}")
        return self._eager(*inputs)
