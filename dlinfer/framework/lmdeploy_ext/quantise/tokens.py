"""A text as a model's own tokenizer reads it."""

from pathlib import Path
from typing import Any

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_checks import in_short


def tokens_of(folder: Path, text: str) -> tuple[list[int], list[int]]:
    """(the token that begins every text, or nothing where there is none; those of ``text``, without it).

    folder: a model's. No code in it is run. Raises ModelFolderError where its tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        first = [token for token in tokenizer("a").input_ids[:1] if token == tokenizer.bos_token_id]
        return first, tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    except Exception as error:  # transformers answers a broken file with whatever it stumbles over
        raise ModelFolderError(
            path=str(folder),
            detail=f"its tokenizer cannot be loaded ({in_short(error)})",
            advice="copy the tokenizer's files from the model again; remote code of a tokenizer is not run here",
        ) from error
