"""Finds the text of each token in a vocabulary, as bytes."""

import random
import weakref
from collections.abc import Sequence
from typing import Any

_known: "weakref.WeakKeyDictionary[Any, Sequence[bytes] | None]" = weakref.WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> Sequence[bytes] | None:
    """Return the bytes of each token's text, by token id.

    The result is None if the texts are unknown, or if joining them gives another text than the tokenizer decodes.
    """
    if tokenizer not in _known:
        _known[tokenizer] = _read(tokenizer)
    return _known[tokenizer]


def text_of(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """Return the text and the bytes of one token. Bytes that form no character appear as escapes in the text."""
    pieces = token_bytes(tokenizer)
    if pieces is not None and token < len(pieces):
        piece = pieces[token]
        return piece.decode(errors="backslashreplace"), piece
    name = tokenizer.convert_ids_to_tokens(token)
    text = "" if name is None else tokenizer.convert_tokens_to_string([name])
    return text, text.encode()


def _read(tokenizer: Any) -> Sequence[bytes] | None:
    import xgrammar

    try:
        pieces = list(xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab)
    except (ValueError, RuntimeError):  # a kind that xgrammar does not know
        return None
    draw = random.Random(0)
    added = set(tokenizer.get_added_vocab().values())
    # Tokens with bytes that form no character are not compared: decoders differ in the text for such bytes.
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - added)
    ordinary = [token for token in vocabulary if "\ufffd" not in pieces[token].decode(errors="replace")]
    for _ in range(64):
        ids = draw.choices(ordinary, k=4)
        joined = b"".join(pieces[token] for token in ids).decode()
        text = tokenizer.convert_tokens_to_string(tokenizer.convert_ids_to_tokens(ids))
        if joined not in (text, f" {text}"):  # SentencePiece drops the first blank
            return None
    return pieces
