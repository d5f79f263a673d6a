"""A device that torch and dlinfer do not know, through ops, graphs, artifacts and LMDeploy.

torch gives its key PrivateUse1 to one device a process and for good, so all of it happens in processes of their own.
``checks_*.py`` are ordinary tests that run in the first one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models.build import build
from tests.e2e.processes import run_process
from tests.torch_releases import IS_2_12

FOLDER = Path(__file__).parent
CHECKS = sorted(FOLDER.glob("checks_*.py"))


def run(*command: str, **env: str) -> str:
    """A Python command with the device's package on the path, as pip would leave it; its output."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    done = run_process([sys.executable, *command], timeout=550, PYTHONPATH=path, **env)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_ops_graphs_and_artifacts():
    assert len(CHECKS) == 4
    options = ["-q", "-x", "-p", "no:cacheprovider", "--show-capture=no"]
    if IS_2_12:  # its ldexp calls a kernel that the stand-in lacks
        options += ["-k", "not scales_that_are_powers_of_two and not (scales and powers)"]
    assert " passed" in run("-m", "pytest", *options, *map(str, CHECKS))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_lmdeploy_gives_the_tokens_of_the_cpu(tmp_path):
    """Unmodified, on the name that frameworks know the device by, eagerly and through the vendor's engine."""
    model = tmp_path / "llama"
    build("llama", model, seed=0, dtype="float32")
    job = str(FOLDER / "lmdeploy_job.py")

    def answers(*arguments: str) -> dict[str, Any]:
        return json.loads(run(job, str(model), *arguments, DLINFER_FALLBACK="allow").splitlines()[-1])

    host = answers("cpu", "eager")
    device = answers("fakecard", "eager", "graph")
    assert host["eager"]["devices"] == ["cpu"] and host["backend"] == ["cpu", "gloo", 64]
    for mode in ("eager", "graph"):
        assert device[mode]["devices"] == ["fakeaccel"]
        assert device[mode]["greedy"] == host["eager"]["greedy"]
        assert device[mode]["sampled"] == host["eager"]["sampled"]
    assert device["backend"] == ["fakecard", "fakeccl", 8]
    assert dict(device["phases"]) == dict.fromkeys(("prefill", "decoding", "logits"), "fakegraphs")
    # What LMDeploy asks of torch.cuda reached the vendor, and so did the ops that it has kernels for.
    assert {"memory", "stream", "current_stream", "synchronize", "empty_cache"} <= set(device["asked"])
    assert {"rms_norm", "silu_and_mul", "linear", "fill_kv_cache"} == set(device["calls"])
