"""float32 beside float16 on a CPU that computes in float16: where there is none, in a process that models one."""

import subprocess
import sys

import pytest

from dlinfer.vendor.openvino.devices import has_bfloat16, has_float16
from tests.vendor.openvino.float16_cpu.plugin import NoModelError

TESTS = "tests/vendor/openvino/workarounds/test_precision.py"


@pytest.mark.slow
@pytest.mark.skipif(has_float16(), reason="this CPU computes in float16: the tests themselves have shown it")
@pytest.mark.skipif(not has_bfloat16(), reason="OpenVINO takes no CPU without bfloat16 for one with float16")
def test_float32_beside_float16():
    """The tests of float32 beside 16 bits, by what such a CPU is given."""
    plugin = "tests.vendor.openvino.float16_cpu.plugin"
    options = ["-q", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-k", "torch.float16"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", plugin, *options, TESTS],
        check=False,
        capture_output=True,
        text=True,
    )
    said = ran.stdout + ran.stderr
    if NoModelError.__name__ in said:
        pytest.skip(said.strip().splitlines()[-1])
    assert ran.returncode == 0, said
    assert " passed" in said and " skipped" not in said, said
