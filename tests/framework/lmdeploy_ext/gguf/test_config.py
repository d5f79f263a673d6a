"""The configuration from a file's metadata is that of the model which was written into the file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.gguf import config, reader
from dlinfer.framework.lmdeploy_ext.gguf.reader import Header
from tests.framework.lmdeploy_ext.gguf import gguf_files
from tests.framework.lmdeploy_ext.gguf.conftest import Written

NOT_IN_FILES = {
    "architectures",
    "initializer_range",
    "_name_or_path",
    "dtype",
    "transformers_version",
    "rms_norm_eps",
}


def test_as_the_model(family: str, written: Written) -> None:
    fields = config.config_of(reader.read(written.path))
    got = AutoConfig.for_model(**fields).to_dict()
    want = written.model.config.to_dict()
    if want.get("head_dim") is None:  # the file tells it always
        want["head_dim"] = want["hidden_size"] // want["num_attention_heads"]
    differ = {key for key in want if got.get(key) != want[key]} - NOT_IN_FILES
    assert differ == set()
    assert got["rms_norm_eps"] == pytest.approx(want["rms_norm_eps"])
    assert fields["architectures"] == [type(written.model).__name__]
    assert fields["dtype"] == "bfloat16"


def changed(header: Header, **values: Any) -> Header:
    """A header with other metadata; None leaves a key out."""
    metadata = header.metadata | {key.replace("__", "."): value for key, value in values.items()}
    return replace(header, metadata={key: value for key, value in metadata.items() if value is not None})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba'"),
        ({"general__architecture": None}, "architecture ''"),
        ({"llama__embedding_length": None}, "lacks llama.embedding_length"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama__rope__dimension_count": 16}, "a part of each head"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama__attention__head_count_kv": [2, 4]}, "differs between layers"),
        (
            {"llama__expert_count": 4, "llama__expert_used_count": 2, "llama__expert_gating_func": 2},
            "not chosen by",
        ),
    ],
)
def test_refused(llama: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFolderError, match=said) as caught:
        config.config_of(changed(reader.read(llama), **values))
    assert caught.value.step


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, {"rope_type": "default"}),
        ({"llama__rope__scaling__type": "none"}, {"rope_type": "default"}),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
         {"rope_type": "linear", "factor": 4.0}),
        ({"llama__rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
          "llama__rope__scaling__original_context_length": 512},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
        ({"llama__attention__head_count_kv": [2, 2]}, {"rope_type": "default"}),
    ],
)  # fmt: skip
def test_rope(llama: Path, values: dict[str, Any], want: dict[str, Any]) -> None:
    got = config.config_of(changed(reader.read(llama), **values))
    assert got["rope_parameters"] == want | {"rope_theta": 10000.0}
    assert got["num_key_value_heads"] == 2


def test_divisors_of_another_scaling(tmp_path: Path) -> None:
    path = tmp_path / "llama3.gguf"
    gguf_files.build("llama3", path, gguf_files.mixed)
    entry = reader.read(path).tensors["rope_freqs.weight"]
    content = bytearray(path.read_bytes())
    content[entry.begin + 3] ^= 1  # the exponent of the first, which is 1
    path.write_bytes(content)
    with pytest.raises(ModelFolderError, match="rope_freqs"):
        config.config_of(reader.read(path))


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        ("llama", "F32", "float32"),
        ("llama", "F16", "float16"),
        ("llama", "BF16", "bfloat16"),
        ("llama", "Q8_0", "bfloat16"),
        ("gemma2", "F16", "bfloat16"),
        ("gemma2", "F32", "float32"),
    ],
)
def test_dtype(tmp_path: Path, family: str, kind: str, dtype: str) -> None:
    path = tmp_path / "one.gguf"
    gguf_files.build(family, path, gguf_files.of_type(getattr(gguf_files.Type, kind)))
    assert config.config_of(reader.read(path))["dtype"] == dtype


def of_tokens(header: Header, change: Callable[[list[str], list[int]], None], **values: Any) -> set[int]:
    tokens = list(header.metadata["tokenizer.ggml.tokens"])
    kinds = list(header.metadata["tokenizer.ggml.token_type"])
    change(tokens, kinds)
    named = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": kinds}
    ends = config.generation_config_of(changed(header, **named, **values))["eos_token_id"]
    return set(ends)


def test_tokens_that_end_an_answer(llama: Path) -> None:
    header = reader.read(llama)
    assert of_tokens(header, lambda tokens, kinds: None) == {2, 4}  # </s>, <|im_end|>

    def add(tokens: list[str], kinds: list[int]) -> None:
        tokens[100], kinds[100] = "<|eot_id|>", 3
        tokens[101], kinds[101] = "<end_of_turn>", 1  # a text, no control token

    assert of_tokens(header, add, tokenizer__ggml__eom_token_id=7) == {2, 4, 7, 100}
