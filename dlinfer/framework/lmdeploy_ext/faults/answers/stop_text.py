"""Stop strings in text that arrives token by token.

A stop may be of several tokens, may lie inside a token, and may cross the borders of tokens. Text that may be the
beginning of a stop is held back, so that streamed text is the text of the whole answer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class StopReason(str):
    """The finish reason ``"stop"`` that also says which stop string ended the answer."""

    sequence: str

    def __new__(cls, sequence: str) -> "StopReason":
        """Make the reason for one stop string."""
        reason = super().__new__(cls, "stop")
        reason.sequence = sequence
        return reason


@dataclass
class Release:
    """Text, tokens and log-probabilities that no later token can take back."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class StopText:
    """Cuts an answer before the first stop string.

    A token belongs to the answer when its text begins before the cut. Tokens without text of their own, such as the
    first bytes of a character, share the text of the next token that has some.

    stops: strings that end the answer; empty ones never match.
    include: keep the stop string in the text, and its tokens.
    least: number of tokens in which no stop may begin.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, least: int = 0) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._least = least
        self._text = ""  # what is not released yet
        self._offset = 0  # characters released before it
        self._floor = 0  # offset in the answer before which no stop begins
        self._fed = 0
        self._tokens: deque[tuple[int, Any, int, int]] = deque()  # id, logprobs, begin and end of its text
        self._without_text: list[tuple[int, Any]] = []
        self.stopped: StopReason | None = None
        self.token_count = 0
        """Number of tokens released."""

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[Any] | None, text: str) -> Release:
        """Add tokens that share a text and return what may be handed out. Nothing is fed after ``stopped``."""
        begin = self._offset + len(self._text)
        self._text += text
        self._fed += len(token_ids)
        rows = logprobs or [None] * len(token_ids)
        self._without_text += zip(token_ids, rows, strict=True)
        if text:
            end = begin + len(text)
            self._tokens += ((token, row, begin, end) for token, row in self._without_text)
            self._without_text.clear()
        if self._fed <= self._least:
            self._floor = begin + len(text)
        cut = self._cut()
        if cut is not None:
            return self._end(cut)
        return self._release(self._offset + len(self._text) - self._held_back())

    def finish(self) -> Release:
        """Return what was held back, once no token follows."""
        released = self._release(self._offset + len(self._text))
        self._hand_out(released, self._without_text)
        self._without_text.clear()
        return released

    def _cut(self) -> int | None:
        """Where the answer ends, or None; sets ``stopped``."""
        first: tuple[int, int, str] | None = None
        start = max(self._floor - self._offset, 0)
        for stop in self._stops:
            at = self._text.find(stop, start)
            if at >= 0 and (first is None or (at, -len(stop)) < first[:2]):
                first = (at, -len(stop), stop)
        if first is None:
            return None
        at, _, stop = first
        self.stopped = StopReason(stop)
        return self._offset + at + (len(stop) if self._include else 0)

    def _held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop."""
        free = len(self._text) - max(self._floor - self._offset, 0)
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, free), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _end(self, cut: int) -> Release:
        released = Release(text=self._text[: cut - self._offset])
        self._hand_out(released, [(token, row) for token, row, begin, _ in self._tokens if begin < cut])
        self._tokens.clear()
        self._without_text.clear()
        self._text = ""
        return released

    def _release(self, end: int) -> Release:
        released = Release(text=self._text[: end - self._offset])
        self._text = self._text[end - self._offset :]
        self._offset = end
        whole: list[tuple[int, Any]] = []
        while self._tokens and self._tokens[0][3] <= end:
            token, row, _, _ = self._tokens.popleft()
            whole.append((token, row))
        self._hand_out(released, whole)
        return released

    def _hand_out(self, released: Release, tokens: Sequence[tuple[int, Any]]) -> None:
        released.token_ids += [token for token, _ in tokens]
        released.logprobs += [row for _, row in tokens if row is not None]
        self.token_count += len(tokens)
