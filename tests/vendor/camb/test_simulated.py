"""The vendor camb on a simulated MLU: torch gives PrivateUse1 to one device a process, so all happens in others.

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
CHECKS = sorted(FOLDER.glob("checks_*.py"))
ENTRY_POINTS = """
[torch.backends]
simulated_mlu = tests.vendor.camb.simulated_mlu.install:install

[dlinfer.vendors]
camb = dlinfer.vendor.camb:VENDOR
"""
ROOT = FOLDER.parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with the simulated device, as pip would leave torch_mlu."""
    info = tmp_path / "installed" / "simulated_mlu-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-mlu\nVersion: 1.0\n")
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
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("block_mlp", "block_attention", "block_moe", "block_model"), id="blocks"),
        pytest.param((), id="whole", marks=pytest.mark.full),
    ],
)
def test_its_claims_hold(installed, asked):
    options = [word for name in asked for word in ("--op", name)]
    assert "camb: every claim holds" in run(installed, "-m", "dlinfer", "conformance", "camb", *options)


def answers(
    installed: Path, model: Path, device: str, dtype: str, *how: str, fallback: str = "allow"
) -> dict[str, Any]:
    """What lmdeploy_job.py prints."""
    job = str(FOLDER / "lmdeploy_job.py")
    said = run(installed, job, str(model), device, dtype, *how, DLINFER_FALLBACK=fallback)
    return json.loads(said.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float16"),
        # in 16 bits rounding decides a token of this model, and transformers in float16 chooses as the MLU does
        pytest.param("qwen3_moe", "float32", marks=pytest.mark.full),
        pytest.param("qwen2", "float16", marks=pytest.mark.full),
    ],
)
def test_lmdeploy_gives_the_tokens_of_the_cpu(installed, tmp_path, family, dtype):
    """Unmodified, eagerly, with no op on a reference."""
    model = tmp_path / family
    build(family, model, seed=0, dtype="float32")
    host, card = (answers(installed, model, device, dtype) for device in ("cpu", "camb"))
    assert host["devices"] == ["cpu"] and card["devices"] == ["mlu"]
    assert card["blocks"] == [64, 16] and all(shape[2] == 16 for shape in card["cache"])
    assert card["short"] == host["short"] and card["long"] == host["long"]
    assert card["fallbacks"] == []
    experts = {"moe_softmax_topk", "moe_gen_idx", "group_gemm", "moe_combine_result"}
    shared = {"fused_rms_norm", "matmul", "apply_rotary", "reshape_paged_cache", "flash_attention"}
    wanted = shared | {"single_query_cached_kv_attn"} | (experts if family == "qwen3_moe" else {"active"})
    assert wanted <= set(card["calls"])


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "dtype"), [("llama", "float16"), ("qwen3_moe", "float32")])
def test_captured_steps_give_the_tokens_of_eager_ones(installed, tmp_path, family, dtype):
    """Unmodified: batches of 1, 2 and 3, the last with a padding row, and sequences that grow across blocks."""
    model = tmp_path / family
    build(family, model, seed=0, dtype="float32")
    eager, captured = (
        answers(installed, model, "camb", dtype, *how, fallback="error") for how in ((), ("captured",))
    )
    for asked in ("short", "long", "again", "three", "grown"):
        assert captured[asked] == eager[asked]
    assert captured["fallbacks"] == []
    (counts,) = captured["captured"]
    assert {"1", "2", "4"} <= set(counts["captures"]) and set(counts["captures"].values()) == {1}
    assert all(counts["replays"][rows] > 0 for rows in ("1", "2", "4"))
    assert set(counts["eager"]) == {"a prefill, whose number of tokens is seldom the same twice"}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_lmdeploy_serves_8_bit_weights(installed, tmp_path):
    """W8A8, with no op on a reference.

    Of one prompt alone the tokens are compared: the two best logits of the others are 0.02 apart, which is less than
    what 8 bits change.
    """
    floats, packed = tmp_path / "llama", tmp_path / "w8a8"
    build("llama", floats, seed=0, dtype="float32")
    run(installed, "-m", "dlinfer", "quantise", str(floats), "--format", "w8a8", "-o", str(packed))
    host, card = (answers(installed, packed, device, "float16") for device in ("cpu", "camb"))
    assert card["short"][0] == host["short"][0]
    assert card["devices"] == ["mlu"] and card["fallbacks"] == []
    assert {"scaled_matmul", "scaled_quantize", "fused_rms_norm"} <= set(card["calls"])
