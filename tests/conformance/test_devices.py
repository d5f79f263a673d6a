"""A compiled result on another device than the vendor's is found."""

import json
import sys

import pytest
import torch

from dlinfer.cli import new_vendor
from dlinfer.conformance import blocks
from dlinfer.conformance.case import Case, Failed, Subject
from dlinfer.conformance.checks import graphs, whole
from dlinfer.ops import registry
from dlinfer.vendor import discovery
from tests.conformance.packages import install, path_with
from tests.e2e.processes import run_process

HOST_LENGTHS = """
import torch
from dlinfer_zeta.torch_device import NAME

def scaled(lengths, x):
    return x * 2, lengths.cumsum(0).int() * 2

with torch.no_grad():
    run = torch.compile(scaled, backend="dlinfer", options={"small_regions": "engine", "fallback": "allow"})
    print([result.device.type for result in run(torch.tensor([3, 4]), torch.ones(2, device=NAME))])
"""


@pytest.fixture
def zeta(tmp_path):
    """The package that ``dlinfer new-vendor zeta`` writes, on a path."""
    install(new_vendor.write("zeta", tmp_path), tmp_path / "site")
    return tmp_path / "site"


def test_an_engine_that_leaves_its_results_on_the_host_fails(zeta, tmp_path):
    engine = zeta / "dlinfer_zeta/engine.py"
    text = engine.read_text()
    assert text.count("(result).to(NAME)") == 1
    engine.write_text(text.replace("(result).to(NAME)", "(result)"))
    found = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "dlinfer",
        "conformance",
        "zeta",
        "--op",
        "rms_norm",
        "--json",
        str(found),
    ]
    done = run_process(
        [*command, "--check", "graph", "--check", "dynamic"], timeout=300, PYTHONPATH=path_with(zeta)
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    failed = {one["check"]: one["detail"] for one in json.loads(found.read_text())["results"]}
    for check in ("graph", "dynamic"):
        assert "EngineResultError" in failed[check] and "on cpu" in failed[check]


def test_the_starter_s_engine_leaves_host_lengths_on_the_host(zeta):
    done = run_process([sys.executable, "-c", HOST_LENGTHS], timeout=200, PYTHONPATH=path_with(zeta))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "['zeta', 'cpu']"


def test_a_compiled_op_and_a_block_on_another_device_fail(monkeypatch):
    """Whatever the engine is: the checks look at the results themselves."""

    def elsewhere(*_: object, **__: object):
        return lambda *args, **kwargs: torch.empty(2, device="meta")

    subject = Subject(discovery.use("cpu"), "cpu")
    monkeypatch.setattr(torch, "compile", elsewhere)
    with torch.no_grad(), pytest.raises(Failed, match="result 0 is on meta, not on cpu"):
        graphs.graph(Case(subject, registry()["silu_and_mul"], torch.float32, "strided"))
    block = next(block for block in blocks.BLOCKS if block.name == "block_mlp")
    with torch.no_grad(), pytest.raises(Failed, match="result 0 is on meta, not on cpu"):
        whole.graph(whole.Whole(subject, block, torch.float32))


@pytest.mark.parametrize("check", [graphs.graph, lambda case: graphs.dynamic(case, [])])
def test_a_compiled_op_that_only_writes_has_no_result_to_look_at(check):
    case = Case(Subject(discovery.use("cpu"), "cpu"), registry()["fill_kv_cache"], torch.float32, "scattered")
    with torch.no_grad():
        check(case)
