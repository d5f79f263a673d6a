"""Headers of GGUF files, read as the package ``gguf`` reads them; damaged files are refused."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.gguf import reader


def small(path: Path, **more: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_array("llama.some", [1, 2, 3])
    writer.add_array("llama.words", ["a", "bc", "ü"])
    writer.add_bool("llama.flag", True)
    writer.add_float32("llama.small", 0.5)
    for key, value in more.items():
        writer.add_uint32(key, value)
    writer.add_tensor("first", np.arange(96, dtype=np.float32).reshape(3, 32))
    writer.add_tensor("second", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("third", np.ones((2, 4, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        reader.read(path)
    assert caught.value.step
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_as_the_package_reads_it(tmp_path: Path) -> None:
    path = small(tmp_path / "small.gguf")
    header, package = reader.read(path), gguf.GGUFReader(path)
    assert header.architecture == "llama"
    assert header.metadata == {
        name: field.contents() for name, field in package.fields.items() if not name.startswith("GGUF.")
    }
    assert header.metadata["llama.words"] == ["a", "bc", "ü"]
    assert {
        tensor.name: (tensor.data_offset, tensor.n_bytes, tuple(map(int, reversed(tensor.shape))))
        for tensor in package.tensors
    } == {name: (entry.begin, entry.nbytes, entry.shape) for name, entry in header.tensors.items()}
    assert header.tensors["third"].rows == 8


def test_a_file_of_a_real_vocabulary_takes_no_seconds(tmp_path: Path) -> None:
    writer, count = gguf.GGUFWriter(tmp_path / "words.gguf", "qwen2"), 150_000
    writer.add_token_list([f"word {i}" for i in range(count)])
    writer.add_token_types([1] * count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokens = reader.read(tmp_path / "words.gguf").metadata["tokenizer.ggml.tokens"]
    assert tokens[-1] == f"word {count - 1}"


def test_a_file_that_ends_anywhere(tmp_path: Path) -> None:
    whole = small(tmp_path / "whole.gguf").read_bytes()
    header = reader.read(tmp_path / "whole.gguf")
    end = max(entry.begin + entry.nbytes for entry in header.tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in range(0, end, 7):
        cut.write_bytes(whole[:size])
        said = refusal(cut)
        assert "truncated" in said or size < 4
    cut.write_bytes(whole[:end])
    assert reader.read(cut).tensors.keys() == header.tensors.keys()


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = small(tmp_path / "one.gguf")
    assert "llama.more" not in reader.read(path).metadata
    small(path, **{"llama.more": 1})
    assert reader.read(path).metadata["llama.more"] == 1


@pytest.mark.parametrize(
    ("at", "bytes_", "said"),
    [
        (0, b"GGML", "does not begin with the letters GGUF"),
        (4, (1).to_bytes(4, "little"), "version 1"),
        (4, (3).to_bytes(4, "big"), "little-endian"),
        (8, (2**40).to_bytes(8, "little"), "header is damaged"),
        (16, (2**40).to_bytes(8, "little"), "truncated"),
    ],
)
def test_a_damaged_beginning(tmp_path: Path, at: int, bytes_: bytes, said: str) -> None:
    path = small(tmp_path / "bad.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:at] + bytes_ + content[at + len(bytes_) :])
    assert said in refusal(path)


def test_a_tensor_of_an_unknown_type(tmp_path: Path) -> None:
    path = small(tmp_path / "bad.gguf")
    content = path.read_bytes()
    at = content.index(b"second") + len(b"second") + 4 + 2 * 8
    assert content[at : at + 4] == (8).to_bytes(4, "little")
    path.write_bytes(content[:at] + (200).to_bytes(4, "little") + content[at + 4 :])
    assert "type 200" in refusal(path)


def test_one_part_of_several(tmp_path: Path) -> None:
    said = refusal(small(tmp_path / "part.gguf", **{"split.count": 3}))
    assert "3 parts" in said
    assert "llama-gguf-split --merge" in said


def test_no_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.gguf")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small(tmp_path / "small.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert 'pip install "dlinfer[gguf]"' in refusal(path)
