"""A build of CPython without the interpreter's lock is refused, and ``import torch`` beside dlinfer still works."""

import subprocess
import sys

import pytest

WITHOUT_LOCK = "import sys; sys._is_gil_enabled = lambda: False; import torch; print('torch'); "


@pytest.mark.parametrize(
    "user", ["dlinfer.ops", "dlinfer.graph.backend", "dlinfer.framework.lmdeploy_ext.install"]
)
def test_every_way_in_names_the_reason_and_what_to_do(user):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCK + f"import {user}"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.stdout == "torch\n"
    assert "UnsupportedFeatureError: CPython without its global interpreter lock" in run.stderr
    assert "PYTHON_GIL=1" in run.stderr
