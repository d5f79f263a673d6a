"""The paged model as two compiled graphs: one for prefill and one for decode. Both have unbacked sizes.

The first forward of a phase compiles the phase's graph. Other sizes never recompile it. If a model cannot be captured
and the fallback policy allows it, the model runs in eager mode.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlinfer import settings
from dlinfer.errors import CaptureError
from dlinfer.framework.mindie_ext.model.paged_model import PagedModel
from dlinfer.framework.transformers_ext import Pages
from dlinfer.framework.transformers_ext.identity import model_identity
from dlinfer.graph.bound_call.call import BoundCall
from dlinfer.graph.bound_call.store import compile_call
from dlinfer.graph.report.policy import leave_graph
from dlinfer.graph.torch_private.dynamo import mark_unbacked

_STEADY = ("pages.caches", "pages.block_size", "pages.is_decode")
"""Arguments that have the same values in all calls of a phase. Graphs may treat these values as constants."""


class CompiledModel:
    """A paged model that runs eagerly or, if ``graph`` is true, as compiled graphs.

    compilations: (phase, how) for each graph. The phase is "prefill" or "decode". how is "compiled", "loaded" (from the
    disk cache) or "eager" (the model cannot be captured). After one prefill and one decode, the list grows only after
    ``forget``.
    """

    def __init__(self, model: PagedModel) -> None:
        self.model = model
        self.graph = False
        self.compilations: list[tuple[str, str]] = []
        self._calls: dict[bool, Callable[..., Any]] = {}

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, pages: Pages) -> Tensor:
        """Return the logits as ``PagedModel.forward`` does. The first call of a phase compiles the phase's graph."""
        kwargs = {"input_ids": input_ids, "position_ids": position_ids, "rows": rows, "pages": pages}
        with torch.no_grad():
            if not self.graph:
                return self.model(**kwargs)
            call = self._calls.get(pages.is_decode)
            return self._compile(kwargs, pages) if call is None else call(**kwargs)

    def unbind(self) -> None:
        """Drop the graphs' references to the KV caches. Callers do so before they change the pool."""
        for call in self._calls.values():
            if isinstance(call, BoundCall):
                call.unbind()

    def forget(self) -> None:
        """Drop the graphs.

        Callers do so after they changed the model's layers; the next forwards compile new graphs.
        """
        self.unbind()
        self._calls.clear()

    def _compile(self, kwargs: dict[str, Any], pages: Pages) -> Tensor:
        phase = "decode" if pages.is_decode else "prefill"
        _mark_sizes(kwargs, pages)
        identity = f"{model_identity(self.model, self.model.model.config)}\n{phase}"
        try:
            call, result, stored = compile_call(self.model, kwargs, identity=identity, steady=_STEADY)
        except CaptureError as error:
            leave_graph(f"{type(self.model.model).__name__} {phase}", error, settings.current().fallback)
            self._calls[pages.is_decode] = self.model
            self.compilations.append((phase, "eager"))
            return self.model(**kwargs)
        self._calls[pages.is_decode] = call
        self.compilations.append((phase, "loaded" if stored else "compiled"))
        return result


def _mark_sizes(kwargs: dict[str, Any], pages: Pages) -> None:
    """Mark as unbacked each input size that changes from call to call. Sizes that are always equal share one name."""
    tokens = "sequences" if pages.is_decode else "tokens"
    rows = "sequences" if pages.is_decode else "rows"
    for name in ("input_ids", "position_ids"):
        mark_unbacked(kwargs[name], 0, tokens)
    mark_unbacked(kwargs["rows"], 0, rows)
    mark_unbacked(pages.slots, 0, tokens)
    mark_unbacked(pages.q_ends, 0, "sequences")
    mark_unbacked(pages.kv_seqlens, 0, "sequences")
    mark_unbacked(pages.block_tables, 0, "sequences")
    mark_unbacked(pages.block_tables, 1, "blocks")
