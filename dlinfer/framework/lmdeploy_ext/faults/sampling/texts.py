"""Store the tokens of each sequence in the model agent, where the next token is drawn.

LMDeploy makes the inputs of a step while the previous step computes. Therefore these inputs lack the newest token of a
sequence, unless another request's prefill came between the two steps. Here a prefill brings all tokens of its sequence,
and each draw appends the drawn token. After a preemption the next prefill replaces the stored tokens.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

START = "dlinfer_start"
"""Key in a row's ``SamplingInputs.session_ctx``. A prefill stores the row's ``Start`` there."""
_ROW = "dlinfer_row"


@dataclass(frozen=True)
class Rules:
    """The rules for how earlier tokens of a request affect its next token. They come from its SamplingParam.

    repetition: penalty on tokens of the prompt and the answer.
    presence, frequency: penalties on tokens of the answer, as OpenAI and vLLM define them.
    ngram_size, ngram_count: the answer ends once its last ``ngram_size`` tokens occur in it ``ngram_count`` times.
    has_drafts: whether speculative decoding may add several tokens in one step.
    min_new_tokens: the request's value if ``has_drafts``. Else it is 0, and LMDeploy counts the tokens itself.
    has_processors: whether logits processors read the tokens of the prompt and the answer.
    is_searched: whether draft tokens are looked up in the prompt and the answer.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    ngram_size: int = 0
    ngram_count: int = 0
    has_drafts: bool = False
    min_new_tokens: int = 0
    has_processors: bool = False
    is_searched: bool = False

    @classmethod
    def of(cls, param: Any, *, has_drafts: bool, is_searched: bool = False) -> "Rules":
        return cls(
            repetition=param.repetition_penalty,
            presence=getattr(param, "presence_penalty", 0.0),
            frequency=getattr(param, "frequency_penalty", 0.0),
            ngram_size=param.repetition_ngram_size,
            ngram_count=param.repetition_ngram_threshold,
            has_drafts=has_drafts,
            min_new_tokens=param.min_new_tokens if has_drafts else 0,
            has_processors=bool(param.logits_processors),
            is_searched=is_searched,
        )

    @property
    def penalises(self) -> bool:
        """Whether the logits of some tokens depend on how often these tokens occur in the sequence."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    @property
    def needs_tokens(self) -> bool:
        """Whether all tokens of the sequence are read in their order."""
        return self.has_processors or self.is_searched


NO_RULES = Rules()


@dataclass(frozen=True)
class Start:
    """The rules and tokens of a sequence at its prefill. prompt: the prompt's tokens; empty if no rule reads them.

    generated: the tokens that were generated before this prefill. Only a preempted sequence, which is prefilled again,
    has such tokens.
    """

    rules: Rules
    prompt: np.ndarray
    generated: np.ndarray
    prompt_length: int

    @classmethod
    def of(cls, seq: Any, *, has_drafts: bool, is_searched: bool = False) -> "Start":
        """Return the Start of a SchedulerSequence."""
        rules = Rules.of(seq.sampling_param, has_drafts=has_drafts, is_searched=is_searched)
        generated = np.array(seq.generated_ids)
        length = seq.num_valid_ids - seq.num_new_tokens
        reads_prompt = rules.repetition != 1.0 or rules.needs_tokens
        prompt = np.array(seq.valid_ids[:length] if reads_prompt else ())
        return cls(rules, prompt.astype(np.int64), generated.astype(np.int64), length)


class Text:
    """The tokens of one sequence. It stores and counts only tokens that the sequence's rules read."""

    def __init__(self, start: Start) -> None:
        self.rules, self.prompt_length = start.rules, start.prompt_length
        self.length = 0
        """Number of generated tokens."""
        self._recent: list[int] = []
        self._place: dict[int, int] = {}
        self._tokens, self._counts = array("q"), array("q")
        self._all = array("q", start.prompt.tolist() if self.rules.needs_tokens else ())
        if self.rules.penalises:
            for token in np.unique(start.prompt).tolist():
                self._place_of(token)
        self.add(start.generated.tolist())

    def add(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)
        if self.rules.needs_tokens:
            self._all.extend(tokens)
        if self.rules.ngram_size > 0:
            self._recent.extend(tokens)
        if self.rules.penalises:
            for token in tokens:
                self._counts[self._place_of(token)] += 1

    def all_tokens(self, drafted: Sequence[int] = ()) -> np.ndarray:
        """Return the tokens that logits processors read, int64 [N]: the prompt, the answer and ``drafted``."""
        return np.array(self._all + array("q", drafted))

    def view(self) -> np.ndarray:
        """Return the prompt and the answer, int64 [N], without a copy. While the result lives, ``add`` fails."""
        return np.frombuffer(self._all, np.int64)

    def counts(self, drafted: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens [N] of the sequence, and how often each was generated [N].

        A token that is only in the prompt has the count 0. drafted: draft tokens that this call counts as generated,
        without storing them.
        """
        tokens, counts = np.array(self._tokens), np.array(self._counts)
        if not drafted:
            return tokens, counts
        fresh = [token for token in dict.fromkeys(drafted) if token not in self._place]
        tokens = np.concatenate([tokens, np.array(fresh, np.int64)])
        counts = np.concatenate([counts, np.zeros(len(fresh), np.int64)])
        for token in drafted:
            counts[tokens == token] += 1
        return tokens, counts

    def repeats(self, window: int, drafted: Sequence[int] = ()) -> bool:
        """Return whether the last ``ngram_size`` tokens occur ``ngram_count`` times in the last ``window`` tokens.

        drafted: draft tokens that this call treats as generated, without storing them.
        """
        size = self.rules.ngram_size
        recent = np.array([*self._recent[-window:], *drafted][-window:])
        if size == 0 or self.rules.ngram_count <= 0 or len(recent) < size:
            return False
        grams = np.lib.stride_tricks.sliding_window_view(recent, size)
        return int((grams == recent[-size:]).all(1).sum()) >= self.rules.ngram_count

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        return place


class Texts:
    """Maps the session id and sequence id of each sequence of a model agent to its Text."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, int], Text] = {}

    def begin(self, inputs: Any, drafted: Sequence[Sequence[int]] | None = None) -> list[tuple[int, Start]]:
        """Attach to each row of a step the Text of its sequence. Return (row, Start) for each row of a prefill.

        inputs: the step's SamplingInputs. drafted: for each row the draft tokens that this step verifies; None without
        drafts.
        """
        starts: list[tuple[int, Start]] = []
        for row, context in enumerate(inputs.session_ctx or ()):
            key = context["session_id"], context["seq_id"]
            start: Start | None = context.get(START)
            if start is not None:
                starts.append((row, start))
                if start.rules == NO_RULES:
                    self._texts.pop(key, None)
                else:
                    self._texts[key] = Text(start)
            if key in self._texts:
                context[_ROW] = self._texts[key], () if drafted is None else drafted[row]
        return starts

    def forget(self, sessions: Iterable[int]) -> None:
        """Remove the Texts of sessions that have ended."""
        if ended := set(sessions):
            self._texts = {key: text for key, text in self._texts.items() if key[0] not in ended}

    def add(self, inputs: Any, tokens: Any) -> None:
        """Append the tokens that a step has drawn to the Texts of its rows.

        inputs: the step's SamplingInputs. tokens: int64 [B], or [B, N] with -1 after a row's last token.
        """
        if not self._texts:
            return
        rows = tokens.reshape(len(inputs.session_ctx), -1).tolist()
        for context, drawn in zip(inputs.session_ctx, rows, strict=True):
            if _ROW in context:
                context[_ROW][0].add([token for token in drawn if token >= 0])

    def clear(self) -> None:
        self._texts.clear()


Row = tuple[int, Text, Sequence[int]]
"""A row of a step, its sequence's Text, and the draft tokens that come before the row."""


def of_rows(contexts: Iterable[dict[str, Any]] | None) -> Iterator[Row]:
    """Yield (row, Text, preceding draft tokens) for each row whose sequence has a Text.

    contexts: the ``session_ctx`` of SamplingInputs. With speculative decoding a sequence has one row for each position.
    The draft tokens are those before the row's position.
    """
    before, place = None, 0
    for row, context in enumerate(contexts or ()):
        place = place + 1 if context is before else 0
        before = context
        if _ROW in context:
            text, drafted = context[_ROW]
            yield row, text, drafted[:place]
