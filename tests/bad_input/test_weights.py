"""A checkpoint that lacks a tensor: LMDeploy 0.18 generates from uninitialised memory; here no engine starts."""

import sys
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from examples.tiny_models.families import FAMILIES
from tests.bad_input.broken_models import WEIGHTS
from tests.e2e.harness import Lab
from tests.e2e.processes import run_process

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

LOAD = """
import sys
from lmdeploy import PytorchEngineConfig, pipeline
if __name__ == "__main__":
    config = PytorchEngineConfig(device_type="cpu", session_len=64, max_batch_size=2, eager_mode=True)
    for path in sys.argv[1:]:
        pipeline(path, backend_config=config, trust_remote_code=True).close()
"""


def load(*paths: Path) -> tuple[int, str]:
    # transformers copies remote code beneath HF_HOME, while another process may be reading what lies there
    with tempfile.TemporaryDirectory() as home:
        done = run_process([sys.executable, "-c", LOAD, *map(str, paths)], timeout=1000, HF_HOME=home)
    return done.returncode, done.stderr


def test_a_missing_part_of_a_parameter_is_refused(copy: Path):
    tensors = load_file(copy / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / WEIGHTS, metadata={"format": "pt"})
    status, said = load(copy)
    assert status != 0
    assert f"ModelFolderError: the model folder '{copy}' cannot be served" in said
    assert "have only a part of model.layers.1.mlp.gate_up_proj.weight" in said


@pytest.mark.full
def test_whole_checkpoints_of_every_family_load(lab: Lab):
    status, said = load(*(lab.model(family) for family in FAMILIES))
    assert status == 0, said
