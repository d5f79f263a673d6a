"""Graphs by the vendor's own torchair, in processes of their own: its package takes torch's key for devices.

``checks_*.py`` are ordinary tests that run in them, on the real torch_npu with stubs for its driver.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import run_process
from tests.vendor.ascend.vendor_package import environment

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "checks", sorted(FOLDER.glob("checks_*.py")), ids=lambda path: path.stem.removeprefix("checks_")
)
def test_checks(checks):
    if reason := environment.missing():
        pytest.skip(reason)
    place = environment.folder()
    path = os.pathsep.join(filter(None, (str(ROOT), str(place / "site"), os.environ.get("PYTHONPATH"))))
    done = run_process(
        [sys.executable, "-m", "tests.vendor.ascend.graph.run_checks", str(checks)],
        timeout=500,
        PYTHONPATH=path,
        LD_LIBRARY_PATH=str(place / "stubs"),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
