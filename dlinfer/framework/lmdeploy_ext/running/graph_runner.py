"""Run LMDeploy's forward through the graph backend, in phases: prefill, decoding and logits. Each is one compiled call.

If a graph engine decodes with the prefill graph as fast as with a graph of its own, prefill and decoding share one
graph, and weights are repacked only once.

LMDeploy calls the runner with the same keyword arguments at each step. Steps differ in sizes, and in flags that tell
the phases apart. Sizes are marked as dynamic before the capture, so that the compiler does not specialise on 1.
LMDeploy's warm-up runs each phase once, so every phase is compiled before the first request.
"""

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lmdeploy.pytorch.backends.graph_runner import GraphRunner

from dlinfer import settings
from dlinfer.errors import CaptureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers import lora
from dlinfer.framework.lmdeploy_ext.ranks import sums
from dlinfer.framework.lmdeploy_ext.running.graph_identity import model_identity
from dlinfer.framework.lmdeploy_ext.running.graph_output_rows import ForwardOfKeptRows, kept_rows
from dlinfer.framework.lmdeploy_ext.vision import parts
from dlinfer.graph.bound_call.call import BoundCall
from dlinfer.graph.bound_call.store import compile_call
from dlinfer.graph.engine import find_engine
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.policy import leave_graph
from dlinfer.graph.report.report import GraphReport
from dlinfer.graph.torch_private.dynamo import mark_fixed, mark_unbacked
from dlinfer.utils import computing

# Field of the attention metadata -> what each of its sizes counts.
_METADATA_SIZES = {
    **dict.fromkeys(("kv_start_indices", "adapter_ids"), ("tokens",)),
    **dict.fromkeys(
        "q_start_loc q_seqlens kv_seqlens kv_seqlens_cpu fresh past_lengths".split(), ("sequences",)
    ),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_q_cpu"), ("ends",)),
    "block_offsets": ("sequences", "blocks"),
    "kept_rows": ("kept",),
    "image_rows": ("pieces",),
    **dict.fromkeys(("image_ends", "image_lengths"), ("images",)),
    "image_blocks": ("images", "blocks"),
    **dict.fromkeys(("chunk_ends", "chunk_lengths"), ("chunks",)),
    "chunk_blocks": ("chunks", "blocks of a chunk"),
}
# Inputs that are the same at each step of an engine: a graph may depend on their sizes and numbers.
_STEADY = (
    "past_key_values",
    "attn_metadata.block_size",
    "hidden_states.size()[2]",
    "position_ids.size()[0]",  # 2 if rotary frequencies depend on lengths, else 1
    "inputs_embeds.size()[2]",
    "mrope_position_ids.size()[0]",
    "target_hidden_states.size()[2]",  # an input of draft models
)


@dataclass
class PhaseCounts:
    """How one phase (prefill, decoding or logits) of an engine runs.

    outcome: ``compiled``, ``loaded`` from the cache, or ``eager``. seconds: the time of compiling or loading.
    reason: the reason for ``eager``, else empty.
    report: the compiled graph's report, as from ``dlinfer.explain``; None if the phase runs eagerly.
    """

    phase: str
    outcome: str
    seconds: float
    reason: str = ""
    report: GraphReport | None = None


@dataclass
class RunnerCounts:
    """The phases of one engine, and the number of its model's forwards.

    No phase should be added after the warm-up, because a request would then wait for the compiler.
    """

    phases: list[PhaseCounts] = field(default_factory=list)
    steps: int = 0


_runners: list[weakref.ref[RunnerCounts]] = []


def counts() -> list[RunnerCounts]:
    """Return the RunnerCounts of each engine in this process that runs compiled graphs, oldest first."""
    return [alive for reference in _runners if (alive := reference()) is not None]


class CompiledRunner(GraphRunner):
    """Runs a model's forward and its logits as compiled graphs.

    last_rows_only: whether a step with prompts returns only the hidden states of each sequence's last token, in the
    order of the sequences. It has no effect if ``ForwardOfKeptRows.forward`` lacks a parameter for one of the inputs.
    """

    last_rows_only = False

    def __init__(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._silent: set[Any] = set()
        self._forward = self._with_adapters(model, model.forward) if lora.has_adapters(model) else model
        self._forward_of_kept = ForwardOfKeptRows(self._forward)
        engine = find_engine(CompileOptions().wanted_engine, activation.torch_device())
        self._phases_alike = engine.phases_alike
        context: Any = self.ctx_mgr
        self._identity = model_identity(
            model,
            build_context=context.build_ctx,
            model_config=self.model_config,
            cache_config=self.cache_config,
            backend_config=self.backend_config,
            ranks=sums.place(),
        )
        self.counts = RunnerCounts()
        _runners.append(weakref.ref(self.counts, _runners.remove))
        self._parts = parts.of_model(model)
        if self._parts is not None:
            self._take_apart(self._parts)

    def _take_apart(self, own: parts.Parts) -> None:
        """Make the language part and the vision part of a model run as separate graphs. own: describes both parts."""
        model: Any = self.model
        language = model.get_submodule(own.language)
        forward = language.forward
        speech = parts.method(own.speech, language, forward)
        if lora.has_adapters(language):
            speech = self._with_adapters(language, speech)
        of_kept_rows = ForwardOfKeptRows(speech)
        owner, function = parts.vision_function(model, own)
        tower = parts.method(own.tower, owner, function)

        def compiled_language(*args: Any, **kwargs: Any) -> Any:
            inputs = parts.named(forward, args, kwargs)
            if inputs.get("inputs_embeds") is None:  # InternVL embeds in the language part
                inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"])
            inputs["input_ids"] = None
            return self._step(speech, own.arrange_speech(model, inputs), of_kept_rows)

        def compiled_vision(*args: Any, **kwargs: Any) -> Any:
            inputs = own.arrange(model, parts.named(function, args, kwargs))
            call = self._calls.get("vision")
            if call is None:
                _mark(parts.marks(own.sizes, inputs))
                return own.restore(self._compile("vision", "vision", tower, inputs, own.steady(inputs)))
            return own.restore(call(**inputs))

        language.forward = compiled_language
        setattr(owner, own.vision[1], compiled_vision)
        self._see_example = lambda: compiled_vision(**own.example(model))

    def _with_adapters(self, owner: torch.nn.Module, forward: Callable[..., Any]) -> torch.nn.Module:
        return lora.ForwardWithAdapters(self.ctx_mgr, owner, forward)

    def __call__(self, **kwargs: Any) -> Any:
        self.counts.steps += 1
        if self._parts is None:
            return self._step(self._forward, kwargs, self._forward_of_kept)
        if "vision" not in self._calls:
            # LMDeploy's warm-up has no images, so the first image of a request would compile the vision part.
            with torch.inference_mode():
                self._see_example()
        return self.model(**kwargs)

    def _step(
        self, function: Callable[..., Any], kwargs: dict[str, Any], of_kept_rows: ForwardOfKeptRows
    ) -> Any:
        """Run one forward, and return its hidden states.

        function: runs the forward. of_kept_rows: is run instead of ``function`` if the step has prompts.
        """
        metadata = kwargs["attn_metadata"]
        # Prefill through the cache serves prompts with and without a cached beginning: one graph, not two.
        metadata.is_prefill_no_cache = False
        if self._phases_alike:  # attention through the cache takes any number of new tokens
            metadata.is_decoding = False
        if not metadata.is_decoding:
            taken = of_kept_rows.taken(kwargs)
            if taken is not None:
                function, kwargs = of_kept_rows, taken
                tokens = metadata.kv_start_indices.numel()
                metadata.kept_rows = kept_rows(metadata, tokens, last_only=self.last_rows_only)
        # There is one graph for each phase and each choice of optional inputs.
        key = metadata.is_decoding, tuple(name for name, value in kwargs.items() if value is not None)
        call = self._calls.get(key)
        if call is not None:
            return self._run(key, call, kwargs)
        _mark_sizes(kwargs)
        if self._parts is not None:
            _mark(parts.marks(self._parts.speech_sizes, kwargs))
        phase = "forward" if self._phases_alike else "decoding" if metadata.is_decoding else "prefill"
        computing.begins()  # hand out the previous step's results before the compiler runs
        result = self._compile(key, phase, function, kwargs)
        hidden = result.get("hidden_states") if isinstance(result, dict) else result
        if isinstance(hidden, torch.Tensor) and hidden.dim() == 3:
            # LMDeploy's warm-up asks for no logits, so the first request would compile them.
            self.get_logits(hidden[:, -1:])
        return result

    def _run(self, key: Any, call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run a compiled call, and signal that a step computes (``utils.computing``), unless the call does so itself.

        key: the call's key in ``_calls``.
        """
        if key in self._silent:
            computing.begins()
        before = computing.count()
        result = call(**kwargs)
        if computing.count() == before:
            self._silent.add(key)
        return result

    def get_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, rows, vocabulary] of hidden_states [1, rows, hidden]."""
        project: Any = getattr(self.model, "get_logits", None)
        if project is None:
            return hidden_states
        call = self._calls.get("logits")
        if call is not None:
            return call(hidden_states=hidden_states)
        hidden_states = hidden_states.clone()
        mark_unbacked(hidden_states, 1, "rows")
        return self._compile("logits", "logits", project, {"hidden_states": hidden_states})

    def reset(self) -> None:
        """Make the compiled calls release the caches. LMDeploy calls this when it sleeps or ends."""
        super().reset()
        for call in self._calls.values():
            if isinstance(call, BoundCall):
                call.unbind()

    def _compile(
        self,
        key: Any,
        phase: str,
        function: Callable[..., Any],
        kwargs: dict[str, Any],
        same: Sequence[str] = (),
    ) -> Any:
        """Compile ``function`` into ``_calls[key]``, and return the result of its first call.

        kwargs: the arguments of that call. same: names of more arguments that are the same at each call, like those in
        ``_STEADY``.
        """
        start = time.perf_counter()
        there = sorted(name for name, value in kwargs.items() if value is not None)
        steady = [name for name in _STEADY if name.partition(".")[0] in kwargs] + list(same)
        try:
            call, result, stored = compile_call(
                function, kwargs, identity=f"{self._identity}\n{phase} {there}", steady=steady
            )
        except CaptureError as error:
            leave_graph(phase, error, settings.current().fallback)
            self.counts.phases.append(PhaseCounts(phase, "eager", 0.0, str(error)))
            result = function(**kwargs)
            self._calls[key] = function
            return result
        self._calls[key] = call
        seconds = time.perf_counter() - start
        outcome = "loaded" if stored else "compiled"
        self.counts.phases.append(PhaseCounts(phase, outcome, seconds, report=call.report))
        print(f"dlinfer: graph mode: {phase} {outcome} in {seconds:.1f} s", file=sys.stderr, flush=True)
        return result


def _mark(sizes: Iterable[tuple[torch.Tensor, int, str | None]]) -> None:
    for tensor, dim, counted in sizes:
        if counted is None:
            mark_fixed(tensor, dim)
        else:
            mark_unbacked(tensor, dim, counted)


def _mark_sizes(kwargs: dict[str, Any]) -> None:
    """Tell Dynamo which sizes of a step's inputs change from step to step, and which changing sizes are equal."""
    metadata = kwargs["attn_metadata"]
    # A decoding step has one token of each sequence.
    tokens = "sequences" if metadata.is_decoding else "tokens"
    for name in ("input_ids", "position_ids", "inputs_embeds", "mrope_position_ids", "target_hidden_states"):
        if isinstance(kwargs.get(name), torch.Tensor):
            mark_unbacked(kwargs[name], 1, tokens)
    if isinstance(kwargs.get("state_ids"), torch.Tensor):
        mark_unbacked(kwargs["state_ids"], 0, "sequences")
    counts = {"tokens": tokens, "chunks": "sequences" if metadata.is_decoding else "chunks"}
    for name, dims in _METADATA_SIZES.items():
        value = getattr(metadata, name)
        if isinstance(value, torch.Tensor):
            for dim, counted in enumerate(dims):
                mark_unbacked(value, dim, counts.get(counted) or counted)
