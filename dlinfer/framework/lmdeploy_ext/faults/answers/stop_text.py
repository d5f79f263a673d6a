"""Find stop strings in text that arrives token by token.

A stop string may span several tokens, and may begin or end inside a token. Text that may be the beginning of a stop
string is held back, so that the streamed pieces join to the text of the whole answer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class StopReason(str):
    """The finish reason ``"stop"``. The attribute ``sequence`` is the stop string that ended the answer."""

    sequence: str

    def __new__(cls, sequence: str) -> "StopReason":
        reason = super().__new__(cls, "stop")
        reason.sequence = sequence
        return reason


@dataclass
class Release:
    """Text, tokens and log-probabilities that may go to the client, because no later token can change them."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]


class StopText:
    """Ends an answer before its first stop string.

    A token belongs to the answer if its text begins before the answer's end. A token without text of its own, such as
    the first bytes of a character, is treated like the next token that has text.

    stops: strings that end the answer. Empty strings are ignored.
    include: whether the answer keeps the stop string and its tokens.
    least: the first ``least`` tokens cannot end the answer. A stop string that begins in one of them has no effect.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, least: int = 0) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._least = least
        self._text = ""  # text that is not released yet
        self._offset = 0  # number of characters released before _text
        self._floor = 0  # offset in the answer before which no stop begins
        self._fed = 0
        self._tokens: deque[tuple[int, Any, int, int]] = deque()  # id, logprobs, begin and end of its text
        self._without_text: list[tuple[int, Any]] = []
        self.stopped: StopReason | None = None
        self.token_count = 0
        """Number of tokens released so far."""

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[Any] | None, text: str) -> Release:
        """Add tokens, and return the text and tokens that may go to the client now.

        text: the text of all ``token_ids`` together. Do not call this again once ``stopped`` is set.
        """
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
        """Return all text and tokens that were held back. Call this after the last token."""
        released = self._release(self._offset + len(self._text), *self._without_text)
        self._without_text.clear()
        return released

    def _cut(self) -> int | None:
        """Return the offset where a stop string ends the answer, and set ``stopped``; None without a stop string."""
        start = max(self._floor - self._offset, 0)
        found_at = ((self._text.find(stop, start), stop) for stop in self._stops)
        cuts = [(at, -len(stop), stop) for at, stop in found_at if at >= 0]
        if not cuts:
            return None
        at, _, stop = min(cuts)
        self.stopped = StopReason(stop)
        return self._offset + at + (len(stop) if self._include else 0)

    def _held_back(self) -> int:
        """Return the length of the longest end of the text that may be the beginning of a stop string."""
        free = len(self._text) - max(self._floor - self._offset, 0)
        beginnings = (stop[:length] for stop in self._stops for length in range(1, min(len(stop), free + 1)))
        return max((len(part) for part in beginnings if self._text.endswith(part)), default=0)

    def _end(self, cut: int) -> Release:
        kept = [(token, row) for token, row, begin, _ in self._tokens if begin < cut]
        released = self._released(self._text[: cut - self._offset], kept)
        self._tokens.clear()
        self._without_text.clear()
        self._text = ""
        return released

    def _release(self, end: int, *further: tuple[int, Any]) -> Release:
        """Release the text up to the offset ``end``, and all tokens whose text ends at ``end`` or before.

        further: (id, log-probabilities) of tokens without text, which are released too.
        """
        text, self._text = self._text[: end - self._offset], self._text[end - self._offset :]
        self._offset = end
        whole: list[tuple[int, Any]] = []
        while self._tokens and self._tokens[0][3] <= end:
            whole.append(self._tokens.popleft()[:2])
        return self._released(text, [*whole, *further])

    def _released(self, text: str, tokens: Sequence[tuple[int, Any]]) -> Release:
        self.token_count += len(tokens)
        rows = [row for _, row in tokens if row is not None]
        return Release(text, [token for token, _ in tokens], rows)
