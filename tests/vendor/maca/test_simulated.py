"""The vendor maca on a simulated card: torch gives PrivateUse1 to one device a process, so all happens in others.

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
from tests.vendor.maca.simulated_card import triton_package

FOLDER = Path(__file__).parent
CHECKS = sorted(FOLDER.glob("checks_*.py"))
ENTRY_POINTS = """
[torch.backends]
simulated_card = tests.vendor.maca.simulated_card.install:install

[dlinfer.vendors]
maca = dlinfer.vendor.maca:VENDOR
"""
ROOT = FOLDER.parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with the simulated device, as pip would leave a vendor's torch package."""
    info = tmp_path / "installed" / "simulated_card-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-card\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return info.parent


def run(installed: Path, *command: str, status: int = 0, **env: str) -> str:
    folders = (installed, FOLDER / "packages", triton_package.folder(), ROOT, os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(str(one) for one in folders if one)
    done = run_process([sys.executable, *command], timeout=1500, PYTHONPATH=path, TRITON_INTERPRET="1", **env)
    assert done.returncode == status, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem.removeprefix("checks_"))
def test_checks(installed, checks):
    options = ("-q", "-x", "-n0", "-m", "", "-rs", "-p", "no:cacheprovider", "--show-capture=no")
    said = run(installed, "-m", "pytest", *options, str(checks))
    assert " passed" in said
    print(said)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(1600)
def test_every_claim_holds(installed):
    said = run(installed, "-m", "dlinfer", "conformance", "maca")
    assert "every claim holds" in said


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1600)
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
    if family == "qwen3_moe" and (reason := triton_package.missing()):
        pytest.skip(reason)
    model = tmp_path / family
    # with 0 the fifth token of Qwen3-MoE's long prompt is a tie in float16 (4.445 and 4.442 in float32)
    build(family, model, seed=int(family == "qwen3_moe"), dtype="float32")
    job = str(FOLDER / "lmdeploy_job.py")

    def answers(device: str) -> dict[str, Any]:
        said = run(installed, job, str(model), device, "float16", DLINFER_FALLBACK="allow")
        return json.loads(said.splitlines()[-1])

    host, card = answers("cpu"), answers("maca")
    assert host["devices"] == ["cpu"] and card["devices"] == ["maca"]
    assert card["short"] == host["short"] and card["long"] == host["long"]
    assert card["fallbacks"] == []
    assert {"rms_norm", "fused_add_rms_norm", "lmdeploy_rotary_embedding"} <= set(card["calls"])
    assert {"flash_attn_varlen_func", "flash_attn_with_kvcache", "reshape_and_cache_flash"} <= set(
        card["calls"]
    )
    assert ("moe_align_block_size" in card["calls"]) is (family == "qwen3_moe")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2_latent"])
def test_captured_steps_give_the_tokens_of_eager_ones(installed, tmp_path, family):
    """Unmodified, with graphs that are strict about a capture: batches of 1, 2 and 3, the last with a padding row."""
    if family != "llama" and (reason := triton_package.missing()):
        pytest.skip(reason)
    model = tmp_path / family
    build(family, model, seed=int(family == "qwen3_moe"), dtype="float32")
    job = str(FOLDER / "lmdeploy_job.py")

    def answers(*how: str) -> dict[str, Any]:
        said = run(installed, job, str(model), "maca", "float16", *how, DLINFER_FALLBACK="error")
        return json.loads(said.splitlines()[-1])

    eager, captured = answers(), answers("captured")
    for asked in ("short", "long", "again", "three"):
        assert captured[asked] == eager[asked]
    assert captured["fallbacks"] == []
    assert ("fwd_kvcache_mla" in captured["calls"]) is (family == "deepseek_v2_latent")
    (counts,) = captured["captured"]
    # LMDeploy's warm-up meets every size before requests come, so that no step of a request is captured
    assert {"1", "2", "4"} <= set(counts["captures"]) and set(counts["captures"].values()) == {1}
    assert all(counts["replays"][rows] > 0 for rows in ("1", "2", "4"))
    assert set(counts["eager"]) == {"a prefill, whose number of tokens is seldom the same twice"}
