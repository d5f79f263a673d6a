"""Keep the texts in ``bad_words``, of one or more tokens, out of an answer.

Before each draw, tokens that would complete a forbidden text get the logit -inf. The forbidden text may have begun in
earlier tokens of the answer, or in the prompt. Texts are compared as bytes, so the comparison is exact. Tokenizers are
refused unless the text of an answer is the concatenation of the texts of its tokens.
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

    text: the forbidden text in UTF-8.
    pieces: token id -> text of the token. It has the tokens that may hold a part of the forbidden text, and the tokens
        that add no text to the answer.
    vocabulary: the tokenizer's number of tokens. A model may have more tokens; those add no text.
    completing: entry n lists the tokens that complete the forbidden text if the answer so far ends in the first n bytes
        of the forbidden text.
    """

    text: bytes
    pieces: dict[int, bytes]
    vocabulary: int
    completing: tuple[torch.Tensor, ...] = field(repr=False)

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits of tokens that would complete the forbidden text to -inf, in place, and return the logits.

        token_ids: all tokens of the prompt and of the answer so far. logits: [vocabulary].
        """
        tail = self._tail(token_ids)
        for length, tokens in enumerate(self.completing):
            if len(tokens) and tail.endswith(self.text[:length]):
                logits[tokens.to(logits.device)] = -torch.inf
        return logits

    def within(self, vocab_size: int) -> "ForbiddenText":
        """Return a processor for a model with ``vocab_size`` tokens, which may be fewer than the tokenizer has."""
        if vocab_size >= self.vocabulary:
            return self
        return replace(self, completing=tuple(tokens[tokens < vocab_size] for tokens in self.completing))

    def _tail(self, token_ids: torch.Tensor) -> bytes:
        """Return the last bytes of the text of ``token_ids``, enough to find every beginning of the forbidden text.

        These are at least ``len(self.text) - 1`` bytes, or the whole text if it is shorter.
        """
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

    tokenizer: LMDeploy's tokenizer. skip_special_tokens: whether special tokens add no text to the answer. Raises
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
    """The texts of a tokenizer's tokens, sorted for binary search: once as they are, and once with reversed bytes."""

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
    """Return the ids of the tokens whose text starts with ``beginning``. tokens: pairs (text, id), sorted."""
    first = bisect.bisect_left(tokens, (beginning, -1))
    so = itertools.takewhile(lambda item: item[0].startswith(beginning), tokens[first:])
    return [token for _, token in so]


_vocabularies: "weakref.WeakKeyDictionary[Any, _Vocabulary]" = weakref.WeakKeyDictionary()
