"""LMDeploy's strategies and agent for drafts that are looked up in the sequences' own texts.

LMDeploy gives each sequence of a decoding step one row and ``num_speculative_tokens`` rows of drafts. Here a sequence
may have fewer drafts: -1 stands for a missing one. The forward and the sampling leave out the rows of missing drafts.
"""

import dataclasses
import time
import weakref
from typing import Any

import numpy as np
import torch
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs
from lmdeploy.pytorch.engine.model_agent.agent import BatchedLogProbs
from lmdeploy.pytorch.spec_decode.base import BaseSpecModelAgent
from lmdeploy.pytorch.strategies.ar.model_inputs import ARModelInputsStrategy
from lmdeploy.pytorch.strategies.ar_spec import ARSpecStrategyFactory
from lmdeploy.pytorch.strategies.ar_spec.engine import ARSpecEngineStrategy
from torch import Tensor

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.faults.sampling import texts
from dlinfer.framework.lmdeploy_ext.faults.sampling.texts import Text
from dlinfer.framework.lmdeploy_ext.ngram import lookup
from dlinfer.framework.lmdeploy_ext.ngram.gain import Drafts, StepTimes

MISSING = -1

Drawn = tuple[Tensor, BatchedLogProbs | None, Tensor, Any]


class EngineStrategy(ARSpecEngineStrategy):
    """Tells LMDeploy's engine how many cache slots a step may need. searches_texts: there is no draft model."""

    searches_texts = True


class StrategyFactory(ARSpecStrategyFactory):
    """Builds LMDeploy's strategies of speculative decoding, but the warm-up decodes one token of each sequence.

    The warm-up's prefill compiles the graph that verifies drafts.
    """

    def build_model_inputs_strategy(self) -> ARModelInputsStrategy:
        return ARModelInputsStrategy()

    def build_engine_strategy(self, cache_config: Any, scheduler_config: Any) -> EngineStrategy:
        return EngineStrategy(
            cache_config=cache_config,
            scheduler_config=scheduler_config,
            num_spec_tokens=self.specdecode_config.num_speculative_tokens,
        )


class NgramAgent(BaseSpecModelAgent):
    """Looks up draft tokens after each step, and verifies them in the next step.

    It is not "enabled" as LMDeploy means it, because it owns no model and no cache, and reads no hidden states.
    drafted, accepted: the numbers of draft tokens that were verified and accepted.
    """

    def __init__(self, *args: Any, guided_decoding_manager: Any = None, **kwargs: Any) -> None:
        """Take the arguments of LMDeploy's ``SpecModelAgent``."""
        super().__init__(*args, **kwargs)
        self._enabled = False
        self._grammars = guided_decoding_manager
        self._times = StepTimes()
        self._drafts: weakref.WeakKeyDictionary[Text, Drafts] = weakref.WeakKeyDictionary()
        self._began: float | None = None
        self.drafted = self.accepted = 0

    def present_rows(self, inputs: Any, *, is_timed: bool) -> Any:
        """Return a decoding step's ModelInputs without the rows of missing drafts.

        is_timed: whether the forward that follows computes nothing else.
        """
        self._began = time.perf_counter() if is_timed else None
        tokens, device = _on_host(inputs.input_ids[0]), inputs.input_ids.device
        is_present = tokens != MISSING
        lengths = is_present.reshape(inputs.seq_length.numel(), -1).sum(1)
        positions = inputs.mrope_pos_ids
        if positions is not None:
            positions = positions[:, torch.from_numpy(is_present).to(device)]
        return inputs.clone(
            input_ids=torch.from_numpy(tokens[is_present])[None].to(device),
            seq_length=torch.from_numpy(lengths).to(device),
            max_q_seqlen=int(lengths.max()),
            mrope_pos_ids=positions,
        )

    async def draw(self, logits: Tensor, inputs: Any, extra_inputs: Any, sampling_inputs: Any) -> Drawn:
        """Draw a token for each row of a step, and accept drafts up to the first that differs from the drawn token.

        logits: [B, V] of the last tokens. Returns the next tokens [B], the log-probabilities of the step's tokens, the
        step's tokens [B, N] with -1 behind the last of each sequence, and ``extra_inputs`` with these tokens.
        """
        sequences, device = inputs.seq_length.numel(), inputs.seq_length.device
        drafts = np.empty((sequences, 0), np.int64)
        if inputs.is_decoding:
            logits, drafts = extra_inputs.target_logits, _on_host(extra_inputs.output_draft_token_ids)
        is_present = np.pad(drafts != MISSING, ((0, 0), (1, 0)), constant_values=True)
        matchers = self._matchers(sampling_inputs)
        processor = FusedLogitsProcessor(
            _repeated(sampling_inputs, is_present.sum(1)), self.misc_config.logprobs_mode
        )
        if matchers:
            processor.guided_decoding_manager = self._grammars
            processor.guided_processors = self._matchers_of_rows(matchers, drafts.tolist())
        logits, raw_logprobs = await processor(logits)
        of_rows: Any = processor.sampling(logits)
        drawn: Any = np.full(is_present.shape, MISSING)
        drawn[is_present] = _on_host(of_rows)
        accepted = ((drawn[:, :-1] == drafts) & is_present[:, 1:]).cumprod(1).sum(1)
        tokens = np.where(np.arange(drawn.shape[1]) > accepted[:, None], MISSING, drawn)
        for sequence, matcher in matchers.items():
            self._advance(matcher, tokens[sequence].tolist())
        next_tokens = torch.from_numpy(drawn[np.arange(sequences), accepted]).to(device)
        extra_inputs = extra_inputs.clone(
            next_token_ids=next_tokens,
            output_token_ids=torch.from_numpy(tokens).to(device),
            num_rejected_tokens=torch.from_numpy(drafts.shape[1] - accepted).to(device),
            target_logits=None,
        )
        logprobs = processor.compute_logprobs(raw_logprobs, of_rows)
        laid_out = None if logprobs is None else _of_tokens(*logprobs, is_present, tokens)
        return next_tokens, laid_out, extra_inputs.output_token_ids, extra_inputs

    async def async_model_forward(self, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any) -> Any:
        """Look up drafts for the next step. Return ``extra_inputs`` with them: int64 [B, most], -1 where missing."""
        sequences = model_inputs.seq_length.numel()
        drafts = np.full((sequences, self.num_spec_tokens), MISSING)
        if model_inputs.is_chunk and not model_inputs.is_last_chunk:
            nothing = model_inputs.seq_length.new_zeros(sequences)
            drawn = {"next_token_ids": nothing, "output_token_ids": nothing[:, None]}
            extra_inputs = extra_inputs.clone(**drawn, num_rejected_tokens=nothing)
        else:
            rows = list(texts.of_rows(sampling_inputs.session_ctx))
            verified = self._note_drafts(extra_inputs, rows) if model_inputs.is_decoding else 0
            cost = self._times.draft_cost(sequences)
            if cost is not None:
                for row, text, _ in rows:
                    draft = self._look_up(text, cost)
                    drafts[row, : len(draft)] = draft
            if model_inputs.is_decoding and self._began is not None:
                self._times.note(sequences, verified, time.perf_counter() - self._began)
        on_device = torch.from_numpy(drafts).to(model_inputs.input_ids.device)
        return extra_inputs.clone(output_draft_token_ids=on_device)

    def _note_drafts(self, extra_inputs: Any, rows: list[texts.Row]) -> int:
        """Record which drafts a step has accepted. Return how many it has verified."""
        drafted = (_on_host(extra_inputs.output_draft_token_ids) != MISSING).sum(1).tolist()
        accepted = ((_on_host(extra_inputs.output_token_ids) != MISSING).sum(1) - 1).tolist()
        for row, text, _ in rows:
            if drafted[row]:
                self._drafts[text].note(drafted[row], accepted[row])
        self.drafted += sum(drafted)
        self.accepted += sum(accepted)
        return sum(drafted)

    def _look_up(self, text: Text, cost: float) -> np.ndarray:
        """Return the draft of a sequence, int64 [N]. It is empty if a draft would probably not pay."""
        configured = settings.current()
        tokens = text.view()
        match = lookup.find(tokens, configured.prompt_lookup_min, configured.prompt_lookup_max)
        if match is None:
            return tokens[:0].copy()
        drafts = self._drafts.setdefault(text, Drafts())
        length = drafts.length(match, cost, self.num_spec_tokens)
        return lookup.continuation(tokens, match.distance, length)

    def _matchers(self, sampling_inputs: Any) -> dict[int, Any]:
        """Return the grammar matcher of each guided sequence."""
        if self._grammars is None:
            return {}
        return self._grammars.get_processors(sampling_inputs.session_ctx, sampling_inputs.response_formats)

    def _matchers_of_rows(self, matchers: dict[int, Any], drafts: list[list[int]]) -> dict[int, Any]:
        """Return a matcher for each row of each guided sequence. It has accepted the drafts before the row."""
        of_rows, row = {}, 0
        for sequence, draft in enumerate(drafts):
            matcher = matchers.get(sequence)
            for token in (*draft[: draft.index(MISSING) if MISSING in draft else None], MISSING):
                if matcher is not None:
                    of_rows[row] = matcher
                    matcher = self._advance(matcher.fork(), [token])
                row += 1
        return of_rows

    def _advance(self, matcher: Any, tokens: list[int]) -> Any:
        """Make a matcher accept tokens other than -1, and return it. It ignores tokens that its grammar forbids."""
        for token in tokens:
            if token != MISSING and not self._grammars.is_terminated(matcher):
                self._grammars.accept_token(matcher, token)
        return matcher

    def update_main_model_outputs(
        self, output: dict[str, Any], model_inputs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        return output.pop("hidden_states"), output


_OF_SEQUENCES = ("response_formats", "logits_processors", "session_ctx")
"""The fields of SamplingInputs that are lists or tuples with an item for each sequence."""


def _on_host(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def _repeated(inputs: SamplingInputs, counts: np.ndarray) -> SamplingInputs:
    """Return SamplingInputs that repeat each sequence's values ``counts`` [B] times, as one row after the other."""
    places = np.repeat(np.arange(len(counts)), counts)
    if len(places) == inputs.batch_size:
        return inputs
    changed: dict[str, Any] = {"batch_size": len(places)}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = value[torch.from_numpy(places).to(value.device)]
        elif field.name in _OF_SEQUENCES and value:
            changed[field.name] = type(value)([value[place] for place in places])
    return dataclasses.replace(inputs, **changed)


def _of_tokens(
    values: Tensor, indices: Tensor, is_present: np.ndarray, tokens: np.ndarray
) -> BatchedLogProbs:
    """Return log-probabilities with a row for each place of ``tokens`` [B, N], and the index -1 where it has no token.

    values, indices: log-probabilities of tokens and their ids, [rows, K]. is_present: bool [B, N], the places of the
    rows.
    """
    rows = torch.from_numpy(is_present.ravel()).to(values.device)
    missing = torch.from_numpy(tokens.ravel() == MISSING).to(values.device)
    all_values, all_indices = (
        part.new_full((len(rows), part.shape[1]), MISSING) for part in (values, indices)
    )
    all_values[rows], all_indices[rows] = values, indices
    all_indices[missing] = MISSING
    return BatchedLogProbs(vals=all_values, indices=all_indices)
