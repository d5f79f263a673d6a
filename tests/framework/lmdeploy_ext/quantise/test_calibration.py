"""``dlinfer quantise --calibrate``: auto-round itself on a tiny model, and every refusal before it starts."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlinfer.cli import main
from dlinfer.errors import ModelFolderError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.conversion.formats import AwqInt4
from dlinfer.framework.lmdeploy_ext.errors import CalibrationError, QuantisationOutputError
from dlinfer.framework.lmdeploy_ext.quantise import job
from dlinfer.framework.lmdeploy_ext.quantise.calibration import PACKAGE, Calibration
from dlinfer.framework.lmdeploy_ext.quantise.run import format_of, quantise
from dlinfer.ops.quantised.packing import AWQ
from examples.tiny_models.build import build
from tests.architecture.imports import REPOSITORY
from tests.framework.lmdeploy_ext.quantise import folders

TEXT = REPOSITORY / "README.md"
SMALL = Calibration(TEXT, samples=24, length=48, steps=24)
FORM = AwqInt4(32)
RUN = job.process.run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With embeddings of few dimensions, as those of trained models nearly are: there data tells what counts."""
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    build("qwen2", folder)
    weights, draws = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    words, hidden = weights["model.embed_tokens.weight"].shape
    few = torch.randn(words, 4, generator=draws) @ torch.randn(4, hidden, generator=draws)
    save_file(
        weights | {"model.embed_tokens.weight": few * 0.1}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def with_weights_of(model: Path, quantised: Path, folder: Path) -> Path:
    """The model with what the packed weights of a folder mean, in float32."""
    shutil.copytree(model, folder)
    floats, stored = load_file(model / "model.safetensors"), load_file(quantised / "model.safetensors")
    for name in list(floats):
        layer = name.removesuffix("weight")
        if f"{layer}qweight" in stored:
            parts = (stored[f"{layer}{part}"] for part in ("qweight", "scales", "qzeros"))
            floats[name] = AWQ.of_groups(32).dequantise(*parts, dtype=torch.float32).t().contiguous()
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(TEXT.read_text()).input_ids[-400:]
    return (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        .eval()(torch.tensor([tokens]))
        .logits
    )


@pytest.mark.slow
def test_a_calibrated_model_is_nearer_to_the_one_in_floats(model, tmp_path, capsys):
    quantise(model, tmp_path / "nearest", FORM)
    arguments = ["--format", "awq-int4", "--group-size", "32", "--json", "--samples", "24", "--length", "48"]
    arguments += ["--calibrate", str(TEXT), "--steps", "24"]
    assert main(["quantise", str(model), *arguments, "-o", str(tmp_path / "out")]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["perplexity"]
    assert found["samples"] == 24 and min(found.values()) > 1
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"] == FORM.config()
    wanted = logits(model)
    errors = {
        name: float(
            (logits(with_weights_of(model, tmp_path / name, tmp_path / f"{name} wide")) - wanted).norm()
        )
        for name in ("nearest", "out")
    }
    assert 0 < errors["out"] < 0.9 * errors["nearest"], errors
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"length": 7}, "length is 7"),
        ({"length": 100_000}, "length is 100000.*at most 2048"),
        ({"text": REPOSITORY / "CONTRIBUTING.md", "length": 2048}, "two samples take 4096"),
        ({"text": Path("mislaid.txt")}, "the text cannot be read"),
    ],
    ids=str,
)
def test_what_cannot_be_calibrated_is_said_before_anything_is_written(model, tmp_path, changes, words):
    with pytest.raises(CalibrationError, match=words):
        quantise(model, tmp_path / "out", FORM, calibration=replace(SMALL, **changes))
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_none(model, tmp_path):
    (tmp_path / "text").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="the text cannot be read: 'utf-8'"):
        quantise(model, tmp_path / "out", FORM, calibration=replace(SMALL, text=tmp_path / "text"))


def test_a_tokenizer_that_is_broken(tmp_path):
    folders.write(tmp_path / "model")  # its tokenizer.json holds nothing
    with pytest.raises(ModelFolderError, match="its tokenizer cannot be loaded"):
        quantise(tmp_path / "model", tmp_path / "out", FORM, calibration=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_formats_of_8_bits_are_not_calibrated(model, tmp_path, name):
    with pytest.raises(UnsupportedFeatureError, match=f"calibrating {name}.*leave --calibrate out"):
        quantise(model, tmp_path / "out", format_of(name), calibration=SMALL)


def test_without_auto_round(model, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: (name != PACKAGE and find(name)) or None)
    arguments = ["--format", "awq-int4", "--group-size", "32", "--calibrate", str(TEXT)]
    assert main(["quantise", str(model), *arguments, "-o", str(tmp_path / "out")]) == 1
    assert (
        'auto-round is not installed. Next step: run `pip install "dlinfer[quantise]"`'
        in capsys.readouterr().err
    )


def test_an_existing_folder_comes_first(model, tmp_path):
    with pytest.raises(QuantisationOutputError, match="it already exists"):
        quantise(model, tmp_path, FORM, calibration=SMALL)


def run_in_place_of_auto_round(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    def instead(command, **given):
        return RUN([command[0], "-c", code, command[-1]], **given)

    monkeypatch.setattr(job.process, "run", instead)


def test_a_process_that_dies_leaves_nothing(model, tmp_path, monkeypatch):
    run_in_place_of_auto_round(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CalibrationError, match=r"signal 9.*memory may have run out"):
        quantise(model, tmp_path / "out", FORM, calibration=SMALL)
    run_in_place_of_auto_round(monkeypatch, "raise SystemExit('no such method')")
    with pytest.raises(CalibrationError, match="ended with status 1: no such method"):
        quantise(model, tmp_path / "out", FORM, calibration=SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ("{}", "auto-round did not write model.layers.0"),
        ("of_all", r"auto-round wrote qweight of .* as \('I32', \(1, 1\)\)"),
    ],
    ids=["none", "of other sizes"],
)
def test_a_layout_that_is_another(model, tmp_path, monkeypatch, tensors, words):
    code = f"""
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
folder = Path(sys.argv[1])
names = json.loads((folder / "job.json").read_text())["names"]
of_all = {{
    name.removesuffix("weight") + part: torch.zeros(1, 1, dtype=torch.int32)
    for name in names for part in ("qweight", "scales", "qzeros")
}}
(folder / "written").mkdir()
save_file({tensors}, folder / "written" / "model.safetensors")
perplexity = dict.fromkeys(("floats", "nearest", "calibrated"), 1.0)
(folder / "answer.json").write_text(json.dumps({{"written": str(folder / "written"), "perplexity": perplexity}}))
"""
    run_in_place_of_auto_round(monkeypatch, code)
    with pytest.raises(CalibrationError, match=words):
        quantise(model, tmp_path / "out", FORM, calibration=SMALL)
    assert list(tmp_path.iterdir()) == []
