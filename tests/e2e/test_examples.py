"""The scripts in ``examples/`` do what they say, run as a user runs them."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from examples.tiny_models import build as tiny_models
from examples.tiny_models.build import STAMP, build, fingerprint
from tests.e2e.harness import Lab
from tests.e2e.processes import run_process
from tests.workers import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

QUESTIONS = ["Shanghai is", "Please introduce China", "How are you?"]


def comparable(text: str) -> str:
    """Without the replacement characters of half-finished UTF-8, which a stream places differently, and control
    characters, which random weights produce and a pipe in text mode changes ("\\r" becomes "\\n")."""
    return "".join(char for char in text if char != "�" and char.isprintable())


@pytest.mark.full
def test_pipeline(lab: Lab) -> None:
    """``tp``, ``cache_max_entry_count`` and the older ``request_output_len`` as LMDeploy's own examples have them."""
    model = lab.model("qwen2")
    done = run_process([sys.executable, str(ROOT / "examples" / "pipeline.py"), str(model)], timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    hf = lab.reference(model, prompts=QUESTIONS, max_new_tokens=256, natural=True)
    tokenizer = lab.tokenizer(model)
    rest = done.stdout
    for i, question in enumerate(QUESTIONS):
        _, mark, rest = rest.partition(f"Q: {question}\nA: ")
        assert mark, f"no answer to {question!r}:\n{done.stdout}"
        answer = rest.partition("\n\nQ: ")[0]
        assert comparable(answer) == comparable(tokenizer.decode(hf[f"natural_{i}"].tolist()))
    notices = [line for line in done.stderr.splitlines() if "request_output_len" in line]
    assert len(notices) == 1, f"expected one line that names max_new_tokens:\n{done.stderr[-4000:]}"
    assert "max_new_tokens" in notices[0]


def run_demo(*options: str, **env: str):
    return run_process([sys.executable, str(ROOT / "examples" / "demo.py"), *options], timeout=900, **env)


def test_demo_trains_a_model_whose_text_is_readable_and_says_equal(lab: Lab, tmp_path: Path) -> None:
    done = run_demo(
        "--tokens", "24", XDG_CACHE_HOME=str(tmp_path), DLINFER_CACHE_DIR=str(lab.compiled), MODEL=""
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("\nequal")
    assert "tokens/s" in done.stdout
    assert "Beautiful is better than ugly.\nExplicit is better than implicit.\n" in done.stdout
    assert [path.name for path in (tmp_path / "dlinfer").iterdir() if path.name.startswith("demo")] == [
        "demo-zen"
    ]


@pytest.mark.full
def test_demo_takes_a_folder_from_the_environment(lab: Lab) -> None:
    done = run_demo("--tokens", "24", MODEL=str(lab.model("llama", dtype="bfloat16")))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "bfloat16" in done.stdout


@pytest.mark.parametrize("missing", ["folder", "config.json", "model.safetensors", "tokenizer.json"])
def test_demo_names_what_is_missing_in_one_line(lab: Lab, tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "model"
    if missing != "folder":
        shutil.copytree(lab.model("qwen2"), folder)
        (folder / missing).unlink()
    done = run_demo("--model", str(folder))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert str(folder) in done.stderr


def test_building_twice_changes_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert build("internlm2", first, seed=3)
    assert build("internlm2", second, seed=3)
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert Path("hf_reference", "model.safetensors") in files
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file

    def written() -> tuple[int, int]:
        found = os.stat(first / "model.safetensors")
        return found.st_ino, found.st_mtime_ns

    before = written()
    assert not build("internlm2", first, seed=3)
    assert written() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], (
        "a temporary folder is left"
    )


def test_building_leaves_what_another_process_built_meanwhile(tmp_path: Path, monkeypatch) -> None:
    """Which may be reading it already."""
    out, write, built = tmp_path / "model", tiny_models._write, []

    def overtaken(*args) -> None:
        monkeypatch.setattr(tiny_models, "_write", write)
        assert build("llama", out)
        built.append(os.stat(out).st_ino)
        write(*args)

    monkeypatch.setattr(tiny_models, "_write", overtaken)
    build("llama", out)
    assert [os.stat(out).st_ino] == built
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_building_replaces_an_outdated_model_only(tmp_path: Path) -> None:
    out = tmp_path / "model"
    build("llama", out, seed=0)
    assert build("llama", out, seed=1)
    assert json.loads((out / STAMP).read_text())["fingerprint"] == fingerprint("llama", 1, "float32")
    (out / STAMP).unlink()
    with pytest.raises(FileExistsError, match="was not built by this script"):
        build("llama", out, seed=0)


@pytest.mark.parametrize(("family", "dtype"), [("gpt5", "float32"), ("llama", "float8")])
def test_unknown_family_or_dtype(tmp_path: Path, family: str, dtype: str) -> None:
    with pytest.raises(ValueError, match="available: "):
        build(family, tmp_path / "model", dtype=dtype)


def test_reference_refuses_to_share_its_process(lab: Lab, tmp_path: Path) -> None:
    """With torch's autoload on, dlinfer is in the process; an oracle must not depend on what is under test."""
    job = tmp_path / "job.json"
    job.write_text("{}")
    script, model, out = ROOT / "examples" / "hf_reference.py", lab.model("qwen2"), tmp_path / "out.npz"
    done = run_process([sys.executable, str(script), str(model), str(job), str(out)], timeout=500)
    assert done.returncode == 1
    assert "dlinfer" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
    assert not out.exists()
