"""A folder that is no usable checkpoint: one clear error, a process that ends, nothing left behind."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import ENGINE_SCRIPT, Lab, run_process

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def remove(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def rename_architecture(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["PotatoForCausalLM"]}))


# What is wrong -> how to do it, and what the error has to name.
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no config": (remove("config.json"), "config.json"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "no weights": (remove("model.safetensors"), "model.safetensors"),
    "truncated weights": (truncate_weights, "truncated"),
    "unknown architecture": (rename_architecture, "PotatoForCausalLM"),
}
QUICK = ("no tokenizer", "truncated weights")


def as_param(name: str):
    return pytest.param(name, id=name, marks=() if name in QUICK else pytest.mark.full)


@pytest.mark.parametrize("name", [as_param(name) for name in DAMAGES])
def test_unusable_model(lab: Lab, tmp_path: Path, name: str) -> None:
    damage, cause = DAMAGES[name]
    folder = tmp_path / "model"
    shutil.copytree(lab.model("qwen2"), folder)
    damage(folder)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"model": str(folder), "trust_remote_code": False, "engine": {}, "steps": []}))
    done = run_process([sys.executable, str(ENGINE_SCRIPT), str(job), str(tmp_path)], timeout=120)
    assert done.returncode != 0, "the engine started all the same"
    last = done.stderr.strip().splitlines()[-1]
    assert str(folder) in last
    assert cause in last
