"""What is said when LMDeploy is switched to a device of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing

from lmdeploy import PytorchEngineConfig


def switch_on():
    PytorchEngineConfig(device_type="cpu")
    PytorchEngineConfig(device_type="cpu")


if __name__ == "__main__":
    switch_on()
    child = multiprocessing.get_context("spawn").Process(target=switch_on)
    child.start()
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.slow
def test_a_misspelt_setting_is_told_of_once_and_not_by_processes_of_the_engine(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    more = {"DLINFER_CPU_WEIGTHS": "int8", "DLINFER_VENDOR": "cpu", "DLINFER_TEST_TREE": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
        env={**os.environ, **more},
    )
    said = "DLINFER_CPU_WEIGTHS is not a setting of dlinfer (did you mean DLINFER_CPU_WEIGHTS?), so it has no effect."
    assert done.stderr.count(said) == 1, done.stderr
    assert done.stderr.count("is not a setting") == 1, done.stderr
