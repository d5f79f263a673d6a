"""Three models that do not fit this machine are refused with bytes needed and free, before a weight is read.

LMDeploy 0.18 itself fills its parameters until the kernel kills the process, and then says nothing.
"""

import json
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.bad_input.large_models import LARGE, Large
from tests.serve.api_server import ApiServer
from tests.serve.processes import ProcessTree

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

GIB = 1 << 30
SECONDS = 400
OPTIONS = ["--session-len", "256", "--max-batch-size", "2"]
TRY_PIPELINE = """
import json, resource, sys
from lmdeploy import PytorchEngineConfig, pipeline
from dlinfer.errors import ModelMemoryError
if __name__ == "__main__":
    try:
        pipeline(sys.argv[1], backend_config=PytorchEngineConfig(device_type="cpu", session_len=256, max_batch_size=2))
    except ModelMemoryError as error:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"text": error.explanation, "step": error.step, "peak": peak}))
"""


# One in the gate, all three in ``make test-full``.
@pytest.fixture(
    scope="module",
    params=[
        name if number == 0 else pytest.param(name, marks=pytest.mark.full)
        for number, name in enumerate(LARGE)
    ],
)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Large:
    """One of the three."""
    return LARGE[request.param](tmp_path_factory.mktemp("large") / request.param)


def figures(text: str) -> tuple[float, float]:
    """(needed, free) in GiB."""
    found = re.search(r"it needs ([\d.]+) GiB.*, but ([\d.]+) GiB are free for this process \(.+\)", text)
    assert found, text
    return float(found[1]), float(found[2])


def check(text: str, large: Large, who: str) -> None:
    """The figures are the model's own and the machine's."""
    needed, free = figures(text)
    assert needed == pytest.approx(large.weights / GIB, abs=0.006)
    total = psutil.virtual_memory().total / GIB
    assert 0 < free <= total < needed
    print(f"\n{who}, {large.folder.name}: {needed:.2f} GiB needed, {free:.2f} GiB free of {total:.2f} GiB")


def test_the_file_takes_no_room(large: Large):
    status = os.stat(large.folder / "model.safetensors")
    assert status.st_size > large.weights > psutil.virtual_memory().total
    assert status.st_blocks * 512 < 1 << 20


def test_preflight_refuses_it(large: Large):
    command = [sys.executable, "-m", "dlinfer", "preflight", str(large.folder), *OPTIONS]
    with ProcessTree([*command, "--json"]) as child:
        assert child.wait(SECONDS) == 1, child.output()[-3000:]
        out = child.output()
    report = json.loads(out[out.index('{\n  "schema"') : out.rindex("}") + 1])
    (refused,) = report["refusals"]
    assert (refused["error"], report["fits"], report["memory"]) == ("ModelMemoryError", False, None)
    assert refused["next_step"]
    assert report["ops"], "its layers were built all the same"
    check(refused["text"], large, "preflight")


def test_a_pipeline_refuses_it_before_weights_load(large: Large):
    # DLINFER_CPU_WEIGHTS=auto may choose 12 bits, by what it measures.
    command = [sys.executable, "-c", TRY_PIPELINE, str(large.folder)]
    with ProcessTree(command, DLINFER_CPU_WEIGHTS="kept") as child:
        assert child.wait(SECONDS) == 0, child.output()[-3000:]
        said = json.loads(child.last_line())
        assert "Loading weights" not in child.output()
        assert child.survivors() == []
    check(said["text"], large, "pipeline")
    assert "its weights" in said["text"]
    assert said["step"]
    assert said["peak"] < 2 * GIB, "nothing of the model was in memory"


@pytest.mark.full
def test_a_server_ends_with_the_figures(tmp_path: Path):
    with ApiServer(LARGE["dense"](tmp_path / "dense").folder) as server:
        assert server.wait(500) == 1, server.output()[-3000:]
        assert server.last_line().startswith("lmdeploy: error: the model does not fit: it needs"), (
            server.last_line()
        )
        assert server.survivors() == []
