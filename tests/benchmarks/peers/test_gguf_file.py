"""A checkpoint as llama.cpp reads it: names, dtypes and bits of the file, by a writer that remembers and by gguf."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.peers import environments, gguf_file

ROOT = Path(__file__).parents[3]
CONFIG = {
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0},
    "vocab_size": 40,
}


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    shapes = {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,)}
    for name in gguf_file.NAMES:
        shapes[f"model.layers.0.{name}"] = (32,) if "norm" in name or "bias" in name else (64, 32)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path, tensors


def test_words_are_the_bits(model):
    folder, tensors = model
    found = dict(gguf_file.bfloat16_words(folder / "model.safetensors"))
    assert found.keys() == tensors.keys()
    for name, words in found.items():
        assert numpy.array_equal(words, tensors[name].view(torch.uint16).numpy())


def test_another_dtype_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(AssertionError, match="a is F32"):
        list(gguf_file.bfloat16_words(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.11.self_attn.q_proj.bias", "blk.11.attn_q.bias"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ],
)
def test_names(name, theirs):
    assert gguf_file.named(name) == theirs


def test_an_unknown_name_is_refused():
    with pytest.raises(KeyError):
        gguf_file.named("model.layers.0.self_attn.rotary_emb.inv_freq")


class Writer:
    """A gguf.GGUFWriter that remembers what it is told."""

    last: "Writer"

    def __init__(self, file: str, architecture: str) -> None:
        self.told: dict[str, Any] = {"file": file, "architecture": architecture}
        self.tensors: dict[str, tuple[Any, Any]] = {}
        self.ended: list[str] = []
        Writer.last = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add_"):
            return lambda value: self.told.__setitem__(name.removeprefix("add_"), value)
        return lambda **_: self.ended.append(name)

    def add_tensor(self, name: str, data: Any, raw_dtype: Any = None) -> None:
        self.tensors[name] = (data, raw_dtype)


@pytest.mark.parametrize("flat", [False, True], ids=["rope_parameters", "rope_theta"])
def test_what_is_written(model, flat, monkeypatch):
    folder, tensors = model
    if flat:
        given = {name: value for name, value in CONFIG.items() if name != "rope_parameters"}
        (folder / "config.json").write_text(json.dumps(given | {"rope_theta": 10000.0}))
    fake: Any = types.ModuleType("gguf")
    fake.GGUFWriter = Writer
    fake.LlamaFileType = types.SimpleNamespace(MOSTLY_BF16=32)
    fake.GGMLQuantizationType = types.SimpleNamespace(BF16=30)
    monkeypatch.setitem(sys.modules, "gguf", fake)
    gguf_file.write(folder, folder / "out.gguf")
    told = Writer.last.told
    assert told["architecture"] == "qwen2"
    assert (told["head_count"], told["head_count_kv"], told["block_count"]) == (4, 2, 1)
    assert (told["rope_freq_base"], told["vocab_size"], told["file_type"]) == (10000.0, 40, 32)
    assert Writer.last.tensors.keys() == {gguf_file.named(name) for name in tensors}
    for name, tensor in tensors.items():
        data, kind = Writer.last.tensors[gguf_file.named(name)]
        if tensor.dim() == 1:
            assert kind is None and numpy.array_equal(data, tensor.float().numpy())
        else:
            assert kind == 30 and data.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert Writer.last.ended[-1] == "close"


def test_gguf_reads_it_back(model):
    """In llama.cpp's environment, where somebody has made it."""
    python = environments.ROOT / "llama.cpp" / "bin" / "python"
    if not (environments.ROOT / "llama.cpp" / "installed").is_file():
        pytest.skip("llama.cpp's environment is not installed: python -m benchmarks.peers makes it")
    folder, tensors = model
    file = folder / "out.gguf"
    command = [str(python), "-m", "benchmarks.peers.gguf_file", str(folder), str(file)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    code = f"""
import json, gguf
reader = gguf.GGUFReader({str(file)!r})
print(json.dumps({{one.name: [one.tensor_type.name, one.data.tobytes().hex()] for one in reader.tensors}}))
"""
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    for name, tensor in tensors.items():
        kind, words = found.pop(gguf_file.named(name))
        wide = tensor.dim() == 1
        assert kind == ("F32" if wide else "BF16")
        assert words == (tensor.float() if wide else tensor).view(torch.uint8).numpy().tobytes().hex()
    assert found == {}
