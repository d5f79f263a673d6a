"""The vendor ascend on a simulated NPU: torch gives PrivateUse1 to one device a process, so all happens in others.

``checks_*.py`` are ordinary tests that run in them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models.build import build
from tests.e2e.processes import run_process

FOLDER = Path(__file__).parent
CHECKS = sorted((*FOLDER.glob("checks_*.py"), *(FOLDER / "capture").glob("checks_*.py")))
ENTRY_POINTS = """
[torch.backends]
simulated_npu = tests.vendor.ascend.simulated_npu.install:install

[dlinfer.vendors]
ascend = dlinfer.vendor.ascend:VENDOR
"""
ROOT = FOLDER.parents[2]
CAPTURED = ("qwen3_moe", "deepseek_v2_latent", "qwen2")
"""Families whose steps are captured besides Llama: experts, the latent cache, biases."""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with the simulated device, as pip would leave torch_npu."""
    info = tmp_path / "installed" / "simulated_npu-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-npu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return info.parent


def run(installed: Path, *command: str, **env: str) -> str:
    path = os.pathsep.join(filter(None, (str(installed), str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run_process([sys.executable, *command], timeout=900, PYTHONPATH=path, **env)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem.removeprefix("checks_"))
def test_checks(installed, checks):
    options = ("-q", "-x", "-n0", "-m", "", "-p", "no:cacheprovider", "--show-capture=no")
    assert " passed" in run(installed, "-m", "pytest", *options, str(checks))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("qwen3_moe", marks=pytest.mark.full),
        pytest.param("qwen2", marks=pytest.mark.full),
    ],
)
def test_lmdeploy_gives_the_tokens_of_the_cpu(installed, tmp_path, family):
    """Unmodified, eagerly, with no op on a reference."""
    model = tmp_path / family
    build(family, model, seed=0, dtype="float32")
    job = str(FOLDER / "lmdeploy_job.py")

    def answers(device: str) -> dict[str, Any]:
        return json.loads(
            run(installed, job, str(model), device, "float16", DLINFER_FALLBACK="allow").splitlines()[-1]
        )

    host, card = answers("cpu"), answers("ascend")
    assert host["devices"] == ["cpu"] and card["devices"] == ["npu"]
    assert card["block_size"] == 128
    assert card["short"] == host["short"] and card["long"] == host["long"]
    assert card["fallbacks"] == []
    assert {"npu_rms_norm", "npu_add_rms_norm", "npu_fused_infer_attention_score"} <= set(card["calls"])


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(one, marks=pytest.mark.full) for one in CAPTURED)]
)
def test_captured_steps_give_the_tokens_of_eager_ones(installed, tmp_path, family):
    """Unmodified, in graphs that are strict about a capture: batches of 1, 2 and 3, the last with a padding row."""
    model = tmp_path / family
    build(family, model, seed=0, dtype="float32")
    job = str(FOLDER / "lmdeploy_job.py")

    def answers(*how: str) -> dict[str, Any]:
        said = run(installed, job, str(model), "ascend", "float16", *how, DLINFER_FALLBACK="error")
        return json.loads(said.splitlines()[-1])

    eager, captured = answers(), answers("captured")
    for asked in ("short", "long", "again", "three"):
        assert captured[asked] == eager[asked]
    assert captured["fallbacks"] == []
    (counts,) = captured["captured"]
    # LMDeploy's warm-up meets every size before requests come, so that no step of a request is captured
    assert {"1", "2", "4"} <= set(counts["captures"]) and set(counts["captures"].values()) == {1}
    assert all(counts["replays"][rows] > 0 for rows in ("1", "2", "4"))
    assert set(counts["eager"]) == {"a prefill, whose number of tokens is seldom the same twice"}
