"""Reads a text file, and tokenizes text with a model's own tokenizer."""

from pathlib import Path
from typing import Any

from dlinfer.errors import DlinferError, ModelFolderError
from dlinfer.framework.lmdeploy_ext.errors import in_short


def read_text(path: Path, folder: Path, error: type[DlinferError]) -> str:
    """Return the text in a UTF-8 file. Raises ``error``, about the model in ``folder``, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        detail = f"the text cannot be read: {reason}"
        raise error(path=str(folder), detail=detail, advice="use a readable file in UTF-8") from reason


def tokens_of(folder: Path, text: str) -> tuple[list[int], list[int]]:
    """Return two lists: the BOS token (empty if the tokenizer adds none), and the tokens of ``text``.

    The tokens of ``text`` include no special tokens. folder: the model folder; code in this folder does not run. Raises
    ModelFolderError if the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        first = [token for token in tokenizer("a").input_ids[:1] if token == tokenizer.bos_token_id]
        return first, tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    except Exception as error:  # transformers raises all kinds of errors for a broken file
        raise ModelFolderError(
            path=str(folder),
            detail=f"its tokenizer cannot be loaded ({in_short(error)})",
            advice="copy the tokenizer's files again; dlinfer quantise does not run a tokenizer's remote code",
        ) from error
