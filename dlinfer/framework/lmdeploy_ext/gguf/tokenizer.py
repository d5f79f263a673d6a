"""Writes the tokenizer and the chat template of a GGUF file as Hugging Face's files.

transformers converts the vocabulary, the merges and the rule that splits texts. Its own classes would read other
tokenizer files beside the GGUF file too, and leave out what is added here:

- tokens before and behind each text;
- words that are tokens as a whole in Llama 3 and Mistral's Tekken, whatever the merges say;
- sentencepiece's space before each text, where the file says that there is none.
"""

from importlib import metadata
from pathlib import Path
from typing import Any

from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.lmdeploy_ext.gguf.reader import Header, unusable

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_ANOTHER = "use the model in the format of Hugging Face, or a file with a tokenizer that is known"

_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Rules whose tokenizers look a word up before they merge its parts. By default, they begin each text with a token."""


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
    if kind == _BYTE_LEVEL and _rule(header) not in _rules(header):
        detail = f"its tokenizer splits texts by the unknown rule {_rule(header)!r} (tokenizer.ggml.pre)"
        raise unusable(header.path, detail, _ANOTHER)


def _rule(header: Header) -> str:
    return header.metadata.get("tokenizer.ggml.pre", "default")


def _rules(header: Header) -> set[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        detail = f"transformers {version()} cannot convert tokenizers of GGUF files ({in_short(error)})"
        raise unusable(header.path, detail, 'run `pip install "dlinfer[gguf]"`') from None
    return {"gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}


def save(header: Header, folder: Path) -> None:
    """Write the tokenizer's files into ``folder``. Raises ModelFolderError as ``check`` does."""
    check(header)
    try:
        _converted(header).save_pretrained(folder)
    except Exception as error:  # transformers raises all kinds of errors
        detail = f"transformers cannot convert its tokenizer ({in_short(error)})"
        raise unusable(header.path, detail, _ANOTHER) from error


def _converted(header: Header) -> Any:
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, named = get_gguf_tokenizer(str(header.path))
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    is_whole = header.metadata["tokenizer.ggml.model"] == _BYTE_LEVEL and _rule(header) in _WHOLE_WORDS
    if is_whole:
        backend.model.ignore_merges = True
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) and not header.metadata.get(
        "tokenizer.ggml.add_space_prefix", True
    ):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    ends = {"bos": named.pop("add_bos_token", is_whole), "eos": named.pop("add_eos_token", False)}
    tokens = {kind: named.get(f"{kind}_token") for kind, is_added in ends.items() if is_added}
    _add(backend, header, tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)


def _add(backend: Any, header: Header, tokens: dict[str, str | None]) -> None:
    """Let a tokenizer put tokens before and behind each text. tokens: bos or eos or both, with their texts."""
    from tokenizers import processors

    tokens = {kind: token for kind, token in tokens.items() if token is not None}
    before, behind = ([tokens[kind]] if kind in tokens else [] for kind in ("bos", "eos"))
    ids = [(token, header.metadata[f"tokenizer.ggml.{kind}_token_id"]) for kind, token in tokens.items()]
    single = processors.TemplateProcessing(single=[*before, "$A", *behind], special_tokens=ids)
    if backend.pre_tokenizer is not None and header.metadata["tokenizer.ggml.model"] == _BYTE_LEVEL:
        single = processors.Sequence([processors.ByteLevel(trim_offsets=False), single])
    backend.post_processor = single
