"""LMDeploy on an engine whose attention is wrong on this CPU: it is not used, and the tokens are right."""

import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Lab
from tests.e2e.processes import run_process

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

PLANT = """
from dataclasses import replace
from dlinfer.graph.engine import find_engine
selftest = find_engine("openvino", "cpu").selftest
for one in selftest.results(run=False):
    if "paged attention" in one.name and one.precision == "float32":
        selftest.save(replace(one, state="failed", reason="planted"))
"""
STEP = {"name": "batch", "kind": "call", "gen": {"max_new_tokens": 12, "ignore_eos": True}}


@pytest.mark.full
def test_tokens_are_right_and_the_reason_is_told(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("openvino")
    lab = Lab(tmp_path)
    request.addfinalizer(lab.close)
    done = run_process([sys.executable, "-c", PLANT], 300, DLINFER_CACHE_DIR=str(tmp_path / "compiled"))
    assert done.returncode == 0, done.stderr
    model = lab.model("qwen2")
    step = STEP | {"prompts": lab.prompts(model)}
    expected = lab.engine(model, [step], eager_mode=True).tokens("batch")
    run = lab.engine(model, [step], environment={"DLINFER_ENGINE": "openvino"})
    assert run.tokens("batch") == expected
    told = [line for graph in run["explained"] if graph["phase"] != "logits" for line in graph["eager"]]
    assert told
    assert any("on this CPU gets 'paged attention, " in line and line.endswith("planted") for line in told)
    assert "runs outside graph engine 'openvino'" in run.log
