"""Tokenizers of GGUF files give the ids of the tokenizers that were written into them, and their chat templates."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.gguf import reader, tokenizer
from examples.tiny_models.tokenizer import CHAT_TEMPLATE, ENGLISH, SPECIAL, train
from tests.framework.lmdeploy_ext.gguf import gguf_files

TEXTS = [
    *ENGLISH,
    "",
    " ",
    "  two spaces, and a tab\tand\n\nlines\r\n",
    "1234567890 and 3.14159, it's we'll THEY'RE",
    "naïve café, Größe, 日本語 and émojis 🎉🎉",
    "<|im_start|>user\nhello<|im_end|>\n",
    "</s> in a text",
]
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes?"}]

# llama.cpp's names of rules, and the rules in the tokenizers of Llama 3 and Qwen2.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
RULES = {"llama-bpe": LLAMA3, "qwen2": LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")}


def split_by(rule: str) -> PreTrainedTokenizerFast:
    """A tokenizer that splits texts by a rule, before words become bytes."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*ENGLISH * 20, "123 1234 12345 it's"] * 20, trainer)
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, **named, extra_special_tokens=SPECIAL[3:], chat_template=CHAT_TEMPLATE
    )


def write(path: Path, add: Callable[[Any], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def read_back(path: Path) -> Any:
    folder = path.parent / "saved"
    folder.mkdir()
    tokenizer.save(reader.read(path), folder)
    return AutoTokenizer.from_pretrained(folder)


def assert_same(got: Any, want: Any) -> None:
    for text in TEXTS:
        ids = want(text).input_ids
        assert got(text).input_ids == ids, text
        assert (
            got(text, add_special_tokens=False).input_ids == want(text, add_special_tokens=False).input_ids
        ), text
        assert got.decode(ids) == want.decode(ids), text
        assert got.decode(ids, skip_special_tokens=True) == want.decode(ids, skip_special_tokens=True), text
    assert (got.bos_token_id, got.eos_token_id) == (want.bos_token_id, want.eos_token_id)


def test_of_gpt2s_rule(tmp_path: Path) -> None:
    want = train()
    got = read_back(write(tmp_path / "one.gguf", lambda writer: gguf_files.add_tokenizer(writer, want)))
    assert_same(got, want)
    assert got.chat_template == want.chat_template
    assert got.apply_chat_template(CHAT, add_generation_prompt=True) == want.apply_chat_template(
        CHAT, add_generation_prompt=True
    )


@pytest.mark.parametrize("rule", RULES)
def test_of_other_rules(tmp_path: Path, rule: str) -> None:
    want = split_by(RULES[rule])

    def add(writer: Any) -> None:
        gguf_files.add_tokenizer(writer, want)
        writer.kv_data[-1].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre(rule)

    assert_same(read_back(write(tmp_path / "one.gguf", add)), want)


def sentences(tmp_path: Path) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH * 50),
        model_writer=model,
        vocab_size=450,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("begins_with_space", [True, False])
def test_of_sentencepiece(tmp_path: Path, begins_with_space: bool) -> None:
    pieces = sentences(tmp_path)

    def kind(number: int) -> int:
        if pieces.is_unknown(number):
            return gguf.TokenType.UNKNOWN
        if pieces.is_control(number):
            return gguf.TokenType.CONTROL
        return gguf.TokenType.BYTE if pieces.is_byte(number) else gguf.TokenType.NORMAL

    def add(writer: Any) -> None:
        numbers = range(pieces.get_piece_size())
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([pieces.id_to_piece(number) for number in numbers])
        writer.add_token_scores([pieces.get_score(number) for number in numbers])
        writer.add_token_types([kind(number) for number in numbers])
        writer.add_bos_token_id(pieces.bos_id())
        writer.add_eos_token_id(pieces.eos_id())
        writer.add_unk_token_id(pieces.unk_id())
        if not begins_with_space:
            writer.add_add_space_prefix(False)

    want = LlamaTokenizer.from_pretrained(tmp_path, add_bos_token=True, add_prefix_space=begins_with_space)
    got = read_back(write(tmp_path / "one.gguf", add))
    assert_same(got, want)
    for text in ENGLISH:  # what the library itself says
        ids = got(text, add_special_tokens=False).input_ids
        assert (ids == pieces.encode(text)) == begins_with_space
        assert got(text).input_ids[0] == pieces.bos_id()


def test_tokens_around_each_text(tmp_path: Path) -> None:
    want = train()

    def add(writer: Any) -> None:
        gguf_files.add_tokenizer(writer, want)
        writer.kv_data[-1].pop("tokenizer.ggml.add_bos_token")
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    got = read_back(write(tmp_path / "one.gguf", add))
    for text in TEXTS:
        assert got(text).input_ids == [1, *want(text).input_ids, 2]
        assert got(text, add_special_tokens=False).input_ids == want(text).input_ids


def test_words_that_no_merges_make(tmp_path: Path) -> None:
    """In Llama 3 a word of the vocabulary is one token; each text begins with one if the file does not say."""
    want = split_by(LLAMA3)

    def add(writer: Any) -> None:
        gguf_files.add_tokenizer(writer, want)
        data = writer.kv_data[-1]
        for key in ("pre", "add_bos_token"):
            data.pop(f"tokenizer.ggml.{key}")
        data["tokenizer.ggml.tokens"].value.append("Ġzzyzx")
        data["tokenizer.ggml.token_type"].value.append(gguf.TokenType.NORMAL)
        writer.add_tokenizer_pre("llama-bpe")

    got = read_back(write(tmp_path / "one.gguf", add))
    assert got("the zzyzx").input_ids == [1, *want("the").input_ids, len(want)]


def test_other_files_beside_it_are_not_read(tmp_path: Path) -> None:
    train().save_pretrained(tmp_path)
    want = split_by(RULES["qwen2"])

    def add(writer: Any) -> None:
        gguf_files.add_tokenizer(writer, want)
        writer.kv_data[-1].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("qwen2")

    assert_same(read_back(write(tmp_path / "one.gguf", add)), want)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": None}, "it has no tokenizer"),
        ({"tokenizer.ggml.tokens": []}, "it has no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, "unknown kind 'rwkv'"),
        ({"tokenizer.ggml.pre": "smollm"}, "unknown rule 'smollm'"),
        ({"tokenizer.ggml.pre": None}, "unknown rule 'default'"),
        ({"tokenizer.ggml.merges": ["a"]}, "cannot convert its tokenizer"),
    ],
)
def test_refused(tmp_path: Path, llama: Path, changes: dict[str, Any], said: str) -> None:
    header = reader.read(llama)
    metadata = {key: value for key, value in {**header.metadata, **changes}.items() if value is not None}
    if "tokenizer.ggml.merges" in changes:  # transformers reads the file itself
        content = llama.read_bytes()
        at = content.index(b"tokenizer.ggml.merges") + len(b"tokenizer.ggml.merges") + 16
        size = int.from_bytes(content[at : at + 8], "little")
        broken = content[: at + 8] + b"x" * size + content[at + 8 + size :]
        header = replace(header, path=tmp_path / "broken.gguf")
        header.path.write_bytes(broken)
    with pytest.raises(ModelFolderError, match=re.escape(said)) as caught:
        tokenizer.save(replace(header, metadata=metadata), tmp_path)
    assert caught.value.step
