"""Who takes part for a precision, and the environments that peers get."""

import os
import subprocess
import venv
from pathlib import Path

import pytest

from benchmarks import models
from benchmarks.peers import entries, environments, kinds


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would be run; nothing is installed or converted."""
    commands: list[list[str]] = []
    monkeypatch.setattr(entries, "python_of", lambda name: f"python of {name}")
    monkeypatch.setattr(entries, "exported", lambda model, python, precision: model / precision)
    monkeypatch.setattr(entries.subprocess, "run", lambda command, check: commands.append(command))
    return commands


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("bf16", ["dlinfer", "genai SDPA", "genai PA", "llama.cpp bf16", "transformers", "inductor"]),
        ("int8", ["dlinfer", "genai SDPA", "genai PA", "llama.cpp q8_0"]),
        ("int4", ["dlinfer", "genai SDPA", "genai PA", "llama.cpp q4_k_m"]),
    ],
)
def test_who_takes_part(precision, names, made, tmp_path):
    (tmp_path / "model-bf16.gguf").touch()
    dense = kinds.KINDS["dense"]
    assert (dense.peers, dense.precisions, dense.weights_read) == (entries.PEERS, entries.PRECISIONS, 1.0)
    found = entries.entries(tmp_path / "model", precision, dense.peers, dense.transformers)
    assert [one.name for one in found] == names
    packed = {"DLINFER_CPU_WEIGHTS": precision, "DLINFER_CPU_HEAD": "int8"}
    rounded = {"DLINFER_CPU_ACTIVATIONS": "int8"}
    environments = {"bf16": {"DLINFER_CPU_WEIGHTS": "auto"}, "int8": packed, "int4": packed | rounded}
    assert found[0].environment == environments[precision]
    assert {one.model.name for one in found[1:3]} == {entries._EXPORTED[precision]}
    assert found[3].model == tmp_path / "model-bf16.gguf"
    assert (found[1].python, found[3].python) == ("python of genai", "python of llama.cpp")
    assert made == []


def test_in_float32_both_compute_in_it(made, tmp_path):
    found = entries.entries(tmp_path / "model", "f32", entries.PEERS, {"transformers": "hf-eager"})
    assert [one.name for one in found] == ["dlinfer", "genai SDPA", "genai PA"]
    assert found[0].options == {"dtype": "float32"} and found[0].environment == {}
    assert {(one.model.name, one.options["precision"]) for one in found[1:]} == {("float32", "f32")}


def test_ours_alone(made, tmp_path):
    assert [one.name for one in entries.entries(tmp_path, "bf16", (), {})] == ["dlinfer"]


def test_who_takes_part_with_a_mixture_of_experts(made, tmp_path):
    moe = kinds.KINDS["moe"]
    (precision,) = moe.precisions
    found = entries.entries(tmp_path / "model", precision, moe.peers, moe.transformers)
    assert [one.name for one in found] == ["dlinfer", "genai SDPA", "genai PA", "transformers"]
    assert found[-1].kind == "hf-eager"
    assert moe.make is models.qwen3_moe and moe.folder == models.MOE_FOLDER != models.FOLDER
    assert made == []  # llama.cpp's file among them, which is of dense models


def test_what_a_mixtures_step_reads_is_the_head_and_4_of_32_experts_a_layer():
    expert, attention, router, head = 3 * 1024 * 384, 2 * 20 * 64 * 1024, 32 * 1024, 32768 * 1024
    read, all_ = (10 * (count * expert + attention + router) + head for count in (4, 32))
    assert kinds.KINDS["moe"].weights_read == pytest.approx(read / all_)
    assert 2 * all_ == pytest.approx(875e6, rel=1e-2)  # bytes of the file


def test_a_file_is_made_once_and_never_half(monkeypatch, tmp_path):
    commands = []

    def run(command: list[str], check: bool) -> None:
        commands.append(command)
        Path(command[-1]).write_text("gguf")
        assert check and not (tmp_path / "model-bf16.gguf").exists()

    monkeypatch.setattr(entries.subprocess, "run", run)
    for _ in range(2):
        assert entries.gguf_of(tmp_path / "model", "python") == tmp_path / "model-bf16.gguf"
    assert len(commands) == 1
    assert (tmp_path / "model-bf16.gguf").read_text() == "gguf"


def test_an_environment_is_made_once_and_never_half(monkeypatch, tmp_path):
    runs = []

    def run(command: list[str], check: bool, env: dict[str, str]) -> None:
        runs.append((command, env))
        if len(runs) == 1:
            raise subprocess.CalledProcessError(1, command)

    def create(folder: Path, with_pip: bool, clear: bool) -> None:
        assert with_pip and clear
        folder.mkdir(parents=True, exist_ok=True)

    monkeypatch.setenv("PYTHONPATH", "/of/ours")
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(venv, "create", create)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        environments.python_of("llama.cpp")
    for _ in range(2):
        assert environments.python_of("llama.cpp") == str(tmp_path / "llama.cpp" / "bin" / "python")
    assert len(runs) == 2
    command, environment = runs[-1]
    assert command[-3:] == list(environments.PACKAGES["llama.cpp"])
    assert environment["CMAKE_ARGS"] == "-DGGML_NATIVE=ON"
    assert "PYTHONPATH" not in environment and environment["PATH"] == os.environ["PATH"]
