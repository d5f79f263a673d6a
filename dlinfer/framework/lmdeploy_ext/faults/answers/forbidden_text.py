"""Keep ``bad_words``, texts of one or more tokens, out of an answer.

Before each draw, tokens that would complete a forbidden text get the logit -inf. The forbidden text may begin in
earlier tokens or in the prompt. The check compares bytes, so it is exact. A tokenizer is refused if the text of an
answer is not the concatenation of its tokens' texts.
"""

import bisect
import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.faults.answers.token_text import token_bytes

_ELSEWHERE = b"\xff"
"""Stands for the text of a token that cannot be part of a forbidden text. UTF-8 never contains this byte."""


@dataclass(frozen=True)
class ForbiddenText:
    """A logits processor that forbids one text. It holds plain data, because it is sent to the engine's process.

    text: the forbidden text, UTF-8.
    pieces: token id -> text of the token, for tokens that may hold a part of the forbidden text, or that have no text.
    vocabulary: number of the tokenizer's tokens. A model may have further tokens; they have no text.
    completing: entry n lists the tokens that complete the forbidden text if its first n bytes end the answer so far.
    """

    text: bytes
    pieces: dict[int, bytes]
    vocabulary: int
    completing: tuple[torch.Tensor, ...] = field(repr=False)

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Set to -inf, in place, the logits [vocabulary] of tokens that would complete the forbidden text.

        token_ids: the tokens of the prompt and of the answer so far.
        """
        tail = self._tail(token_ids)
        for length, tokens in enumerate(self.completing):
            if len(tokens) and tail.endswith(self.text[:length]):
                logits[tokens.to(logits.device)] = -torch.inf
        return logits

    def within(self, vocab_size: int) -> "ForbiddenText":
        """Return a processor without tokens >= ``vocab_size``, as a tokenizer may have more tokens than the model."""
        if vocab_size >= self.vocabulary:
            return self
        return replace(self, completing=tuple(tokens[tokens < vocab_size] for tokens in self.completing))

    def _tail(self, token_ids: torch.Tensor) -> bytes:
        """Return the last bytes of the tokens' text: one byte fewer than the forbidden text has, or more."""
        longest = len(self.text) - 1
        tail = b""
        end = len(token_ids)
        while end and len(tail) < longest:
            begin = max(end - longest, 0)
            ids = token_ids[begin:end].tolist()
            parts = (self.pieces.get(i, _ELSEWHERE) if i < self.vocabulary else b"" for i in ids)
            tail = b"".join(parts) + tail
            end = begin
        return tail


def forbid(text: str, tokenizer: Any, skip_special_tokens: bool) -> ForbiddenText:
    """Return the logits processor that forbids ``text``.

    tokenizer: LMDeploy's. skip_special_tokens: whether special tokens add no text to the answer. Raises
    UnsupportedFeatureError if the text of an answer is not the concatenation of its tokens' texts.
    """
    plain = tokenizer.model.model
    if plain not in _vocabularies:
        pieces = token_bytes(plain)
        if pieces is None:
            raise refuse(
                f"bad_words with {type(plain).__name__}, a tokenizer whose token texts do not join to the answer's "
                f"text,",
                "forbid single tokens with bad_token_ids",
            )
        _vocabularies[plain] = _Vocabulary(pieces, plain.all_special_ids)
    return _vocabularies[plain].forbid(text.encode(), skip_special_tokens)


class _Vocabulary:
    """The texts of a tokenizer's tokens: sorted once by their beginnings, once by their ends, for binary search."""

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        self._pieces = pieces
        self._special = frozenset(special)
        self._forwards = sorted((piece, token) for token, piece in enumerate(pieces))
        self._backwards = sorted((piece[::-1], token) for token, piece in enumerate(pieces))
        self.forbid = functools.lru_cache(maxsize=256)(self._forbid)  # a search reads the whole vocabulary

    def _forbid(self, text: bytes, skip_special: bool) -> ForbiddenText:
        dropped = self._special if skip_special else frozenset()
        containing = [token for token, piece in enumerate(self._pieces) if text in piece]
        completing = [containing]
        sharing: set[int] = set()
        for length in range(1, len(text)):
            completing.append(_starting(self._forwards, text[length:]))
            sharing.update(_starting(self._backwards, text[:length][::-1]))
        # Tokens inside the forbidden text. The loop has found those that end in its beginning.
        sharing.update(token for token, piece in enumerate(self._pieces) if piece in text)
        pieces = {token: self._pieces[token] for token in sharing - dropped} | dict.fromkeys(dropped, b"")
        kept = (torch.tensor([token for token in tokens if token not in dropped]) for tokens in completing)
        return ForbiddenText(text, pieces, len(self._pieces), tuple(tokens.long() for tokens in kept))


def _starting(tokens: Sequence[tuple[bytes, int]], beginning: bytes) -> list[int]:
    """Return the ids of the tokens whose text starts with ``beginning``. tokens: sorted pairs (text, id)."""
    first = bisect.bisect_left(tokens, (beginning, -1))
    so = itertools.takewhile(lambda item: item[0].startswith(beginning), tokens[first:])
    return [token for _, token in so]


_vocabularies: "weakref.WeakKeyDictionary[Any, _Vocabulary]" = weakref.WeakKeyDictionary()
