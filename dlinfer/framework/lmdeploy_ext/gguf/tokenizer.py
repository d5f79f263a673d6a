"""Writes the tokenizer and the chat template of a GGUF file as Hugging Face's files. transformers converts them."""

from importlib import metadata
from pathlib import Path

from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.lmdeploy_ext.gguf.reader import Header, unusable

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_ANOTHER = "use the model in the format of Hugging Face, or a file with a tokenizer that is known"


def version() -> str:
    """Return the version of the package that converts tokenizers."""
    return metadata.version("transformers")


def check(header: Header) -> None:
    """Raise ModelFolderError for a file without a tokenizer, or with one that cannot be converted.

    transformers would split texts by GPT-2's rule if it does not know the file's rule. The tokens would be others.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind is None or not header.metadata.get("tokenizer.ggml.tokens"):
        advice = "convert the model again with its tokenizer, or use a complete file"
        raise unusable(header.path, "it has no tokenizer", advice)
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise unusable(header.path, f"its tokenizer is of the unknown kind {kind!r}", _ANOTHER)
    rule = header.metadata.get("tokenizer.ggml.pre", "default")
    if kind == _BYTE_LEVEL and rule not in _rules(header):
        detail = f"its tokenizer splits texts by the unknown rule {rule!r} (tokenizer.ggml.pre)"
        raise unusable(header.path, detail, _ANOTHER)


def _rules(header: Header) -> set[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        detail = f"transformers {version()} cannot convert tokenizers of GGUF files ({error})"
        raise unusable(header.path, detail, "install the release of transformers that was tested") from None
    return {"gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}


def save(header: Header, folder: Path) -> None:
    """Write the tokenizer's files into ``folder``. Raises ModelFolderError as ``check`` does."""
    from transformers import PreTrainedTokenizerFast

    check(header)
    try:
        tokens = PreTrainedTokenizerFast.from_pretrained(header.path.parent, gguf_file=header.path.name)
    except Exception as error:  # transformers raises all kinds of errors
        detail = f"transformers cannot convert its tokenizer ({in_short(error)})"
        raise unusable(header.path, detail, _ANOTHER) from error
    tokens.save_pretrained(folder)
