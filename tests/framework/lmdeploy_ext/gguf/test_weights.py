"""Tensors of GGUF files under the checkpoint's names, with the numbers of the model that was written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.gguf import names, reader, weights
from dlinfer.ops.quantised import gguf
from tests.framework.lmdeploy_ext.gguf import gguf_files
from tests.framework.lmdeploy_ext.gguf.conftest import Written

Saved = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def saved(written: Written, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What transformers saves of the model, which is the checkpoint in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("saved")
    written.model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_unpacked(written: Written, saved: Saved) -> None:
    got = {
        name: tensor
        for name, tensor, is_packed in weights.tensors(written.path, "", lambda name: False, torch.float32)
        if not is_packed
    }
    assert got.keys() == saved.keys()
    for name, want in saved.items():
        assert torch.equal(got[name], want), name
        assert torch.equal(weights.lookup(written.path)(name), want), name


def test_shapes(written: Written, saved: Saved) -> None:
    got = {name: tuple(tensor.shape) for name, tensor in weights.empty_tensors(written.path)}
    assert got == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    stored = model_files.header(written.path)
    assert {name: entry.shape for name, entry in stored.items()} == got
    inside = sum(entry.nbytes for entry in reader.read(written.path).tensors.values())
    skipped = reader.read(written.path).tensors.get("rope_freqs.weight")
    assert sum(entry.nbytes for entry in stored.values()) == inside - (skipped.nbytes if skipped else 0)


def test_blocks_are_of_the_same_rows(written: Written, saved: Saved) -> None:
    for name, blocks, is_packed in weights.tensors(
        written.path, "x.", lambda name: "proj" in name and "bias" not in name, torch.float32
    ):
        plain = name.removeprefix("x.")
        assert is_packed == ("proj" in plain and "bias" not in plain)
        if is_packed:
            kind = gguf.TYPES[weights.sources(written.path)[plain].entry.type]
            assert torch.equal(gguf.values(kind, blocks, torch.float32), saved[plain]), plain


def test_in_another_dtype(llama: Path) -> None:
    wide = {name: tensor for name, tensor, _ in weights.tensors(llama, "", lambda name: False, torch.float32)}
    for name, tensor, _ in weights.tensors(llama, "", lambda name: False, torch.bfloat16):
        assert torch.equal(tensor, wide[name].bfloat16()), name


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_XS"])
def test_types_that_only_the_package_reads(tmp_path: Path, kind: str) -> None:
    of_package = getattr(gguf_files.Type, kind)
    path = tmp_path / "other.gguf"
    gguf_files.build("llama", path, gguf_files.of_type(gguf_files.Type.Q8_0))
    source = weights.sources(path)["model.layers.0.mlp.up_proj.weight"]
    numbers, nbytes = reader.type_sizes(path)[int(of_package)]
    rows = source.entry.nbytes // nbytes
    entry = replace(source.entry, type=int(of_package), shape=(rows, numbers), row_bytes=nbytes)
    got = weights._Reader(path).numbers(replace(source, entry=entry), torch.float32)
    stored = path.read_bytes()[entry.begin : entry.begin + entry.nbytes]
    blocks = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(rows, nbytes).numpy()
    want = torch.from_numpy(gguf_files.values(blocks, of_package))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_tensor_without_a_place(llama: Path) -> None:
    header = reader.read(llama)
    entry = replace(header.tensors["blk.0.attn_q.weight"], name="blk.0.attn_sinks.weight")
    with pytest.raises(ModelFolderError, match=r"blk\.0\.attn_sinks\.weight has no place"):
        names.sources(replace(header, tensors={**header.tensors, entry.name: entry}))


def test_rows_that_are_no_whole_heads(llama: Path) -> None:
    header = reader.read(llama)
    metadata = header.metadata | {"llama.attention.head_count": 7}
    with pytest.raises(ModelFolderError, match="for 7 heads"):
        names.sources(replace(header, metadata=metadata))


def test_the_index_names_all_tensors(written: Written, saved: Saved, cache: Path) -> None:
    from dlinfer.framework.lmdeploy_ext.gguf.folder import model_folder

    index = json.loads((model_folder(written.path) / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(saved, "model.gguf")
