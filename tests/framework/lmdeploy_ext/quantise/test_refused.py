"""What cannot be quantised is refused by name, and nothing is written, or nothing is left."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlinfer.cli import main
from dlinfer.cli import quantise as command
from dlinfer.errors import DlinferError, ModelFolderError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.conversion.formats import FORMATS
from dlinfer.framework.lmdeploy_ext.errors import QuantisationOutputError, QuantisationSourceError
from dlinfer.framework.lmdeploy_ext.quantise import run, source, writer
from dlinfer.framework.lmdeploy_ext.quantise.run import format_of, quantise
from tests.framework.lmdeploy_ext.quantise import folders


def check_refused(tmp_path: Path, form: str, error: type[DlinferError], text: str) -> None:
    """Refused with a step to take, and the folder beside is as it was."""
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(error, match=text) as caught:
        quantise(tmp_path / "model", tmp_path / "out", format_of(form))
    assert caught.value.step
    assert {path.name for path in tmp_path.iterdir()} == before


def fresh(**changed: Tensor | None) -> dict[str, Tensor]:
    """Weights, some of them changed or left out; "__" stands for "." in names."""
    weights = folders.tensors()
    for name, tensor in changed.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    return weights


UP = "model__layers__1__mlp__up_proj__weight"
DOWN = "model__layers__0__mlp__down_proj__weight"

WEIGHTS: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "no weight": ("w8a8", {UP: None}, "it lacks model.layers.1.mlp.up_proj.weight"),
    "int8 already": ("w8a8", {UP: torch.zeros(384, 256, dtype=torch.int8)}, "already quantised: .* dtype I8"),
    "fp8 already": (
        "fp8",
        {UP: torch.zeros(384, 256).to(torch.float8_e4m3fn)},
        "already quantised: .* F8_E4M3",
    ),
    "scale": ("w8a8", {UP.removesuffix("weight") + "scale": torch.ones(384, 1)}, "up_proj.scale beside"),
    "vector": ("w8a8", {UP: torch.zeros(384)}, r"shape \[384\]"),
    "empty": ("w8a8", {UP: torch.zeros(0, 256)}, r"shape \[0, 256\]"),
    "group": (
        "awq-int4",
        {DOWN: torch.zeros(256, 320)},
        "320 inputs are not a multiple of the group size 128",
    ),
    "word": ("awq-int4", {UP: torch.zeros(383, 256)}, "383 outputs are not a multiple of 8"),
    "rows of a block": (
        "fp8",
        {UP: torch.zeros(320, 256)},
        "320 outputs are not a multiple of the block size 128",
    ),
    "columns of a block": ("fp8", {DOWN: torch.zeros(256, 320)}, "320 inputs are not a multiple"),
    "NaN": ("fp8", {UP: torch.full((384, 256), float("nan"))}, "infinity or NaN"),
    "infinity": ("awq-int4", {UP: torch.full((384, 256), float("inf"))}, "infinity or NaN"),
    "beyond float16": ("awq-int4", {UP: torch.full((384, 256), 1e8)}, "too large for the format's scales"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(tmp_path, case):
    form, changed, text = WEIGHTS[case]
    folders.write(tmp_path / "model", fresh(**changed))
    check_refused(tmp_path, form, QuantisationSourceError, text)


CONFIGS = {
    "class": (
        {"architectures": ["MixtralForCausalLM"]},
        UnsupportedFeatureError,
        "quantising MixtralForCausalLM",
    ),
    "mapped class": (
        {"auto_map": {"AutoModelForCausalLM": "modeling.OtherForCausalLM"}},
        UnsupportedFeatureError,
        "quantising OtherForCausalLM",
    ),
    "no class": ({"architectures": []}, QuantisationSourceError, "names no architecture"),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq"}},
        QuantisationSourceError,
        r"already quantised \(gptq\)",
    ),
    "no layers": ({"num_hidden_layers": None}, ModelFolderError, "num_hidden_layers"),
    "more layers": ({"num_hidden_layers": 3}, QuantisationSourceError, "lacks model.layers.2"),
    # What the adaptor refuses of the folder that would be written.
    "hidden size": ({"hidden_size": 200}, UnsupportedFeatureError, "hidden_size=200"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(tmp_path, case):
    config, error, text = CONFIGS[case]
    folders.write(tmp_path / "model", **config)
    check_refused(tmp_path, "awq-int4", error, text)


def test_every_admitted_class(tmp_path):
    for name in source.ADMITTED:
        folders.write(tmp_path / name, architectures=[name])
        assert len(source.read(tmp_path / name, format_of("fp8")).quantised) == 14


DAMAGE: dict[str, tuple[Callable[[Path], object], type[DlinferError], str]] = {
    "no folder": (shutil.rmtree, ModelFolderError, "no such folder"),
    "no config": (lambda model: (model / "config.json").unlink(), ModelFolderError, "no config.json"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), ModelFolderError, "tokenizer"),
    "no shard": (
        lambda model: (model / "model-00002-of-00002.safetensors").unlink(),
        ModelFolderError,
        "model-00002-of-00002.safetensors, which is missing",
    ),
    "cut off": (
        lambda model: (model / "model-00001-of-00002.safetensors").write_bytes(b"\x10" * 20),
        ModelFolderError,
        "truncated or corrupt",
    ),
    "pickled": (
        lambda model: (
            (model / "model.safetensors.index.json").unlink(),
            torch.save({}, model / "pytorch_model.bin"),
        ),
        QuantisationSourceError,
        "pickled",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folders(tmp_path, case):
    damage, error, text = DAMAGE[case]
    folders.write(tmp_path / "model", shards=2)
    damage(tmp_path / "model")
    check_refused(tmp_path, "w8a8", error, text)


def test_a_folder_that_exists_is_not_touched(tmp_path):
    folders.write(tmp_path / "model")
    (tmp_path / "out").mkdir()
    check_refused(tmp_path, "w8a8", QuantisationOutputError, "it already exists")
    (tmp_path / "out").rmdir()
    (tmp_path / "out").symlink_to("nowhere")
    check_refused(tmp_path, "w8a8", QuantisationOutputError, "it already exists")


def test_a_folder_that_appears_meanwhile_is_not_touched(tmp_path):
    folders.write(tmp_path / "model")

    def appear(done: int, total: int, name: str) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)

    with pytest.raises(QuantisationOutputError, match="it already exists"):
        quantise(tmp_path / "model", tmp_path / "out", format_of("w8a8"), appear)
    assert list((tmp_path / "out").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_no_folder_to_write_into(tmp_path):
    folders.write(tmp_path / "model")
    with pytest.raises(QuantisationOutputError, match="there is no folder"):
        quantise(tmp_path / "model", tmp_path / "none" / "out", format_of("w8a8"))


def test_no_room_on_the_disk(tmp_path, monkeypatch):
    folders.write(tmp_path / "model")
    out = tmp_path / "whole"
    quantise(tmp_path / "model", out, format_of("w8a8"))
    needed = sum(path.stat().st_size for path in out.iterdir() if path.name != "config.json")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    check_refused(
        tmp_path, "w8a8", QuantisationOutputError, f"takes {needed} bytes, but only {needed - 1} are free"
    )
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: usage._replace(free=needed))
    quantise(tmp_path / "model", tmp_path / "out", format_of("w8a8"))


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    folders.write(tmp_path / "model")
    original, count = writer.ShardWriter.write, iter(range(100))

    def write(self, name, tensor):
        if next(count) == 5:
            raise OSError(28, "No space left on device")
        original(self, name, tensor)

    monkeypatch.setattr(writer.ShardWriter, "write", write)
    check_refused(tmp_path, "w8a8", QuantisationOutputError, "No space left on device")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tmp_path, monkeypatch, capsys, request, number):
    folders.write(tmp_path / "model")
    monkeypatch.setattr(writer.ShardWriter, "write", lambda *_: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    # a shell's background job ignores them
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, interrupts))
    arguments = ["quantise", str(tmp_path / "model"), "--format", "fp8", "-o", str(tmp_path / "out")]
    assert main(arguments) == 128 + number
    assert "was not written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_index_names_no_file_elsewhere(tmp_path):
    weights = folders.write(tmp_path / "model")
    (tmp_path / "model/model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "../elsewhere.safetensors")}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    check_refused(tmp_path, "w8a8", QuantisationSourceError, "names '../elsewhere")


@pytest.mark.parametrize(
    ("form", "group_size", "text"),
    [
        ("awq-int4", 100, "group size 100"),
        ("awq-int4", 0, "group size 0"),
        ("fp8", 128, "a group size for fp8"),
        ("w8a8", 32, "a group size for w8a8"),
        ("gptq", None, "the format 'gptq'"),
    ],
)
def test_formats(form, group_size, text):
    with pytest.raises(UnsupportedFeatureError, match=text):
        format_of(form, group_size)


def test_the_command_tells_the_error(tmp_path, capsys):
    assert tuple(FORMATS) == command.FORMATS
    folders.write(tmp_path / "model", architectures=["MixtralForCausalLM"])
    arguments = ["quantise", str(tmp_path / "model"), "--format", "fp8", "-o", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "error: quantising MixtralForCausalLM" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["error"] == "UnsupportedFeatureError" and said["next_step"]
