"""Kernels may be asked for before anybody has imported dlinfer.ops."""

import subprocess
import sys

import pytest

CODE = """
import sys
from dlinfer.vendor import discovery

discovery.use({name!r})
assert "dlinfer.ops" not in sys.modules
assert discovery.kernels_of(discovery.active("cpu"))
import dlinfer.ops, torch
x = torch.ones(2, 4)
torch.testing.assert_close(dlinfer.ops.rms_norm(x, torch.ones(4), 1e-6), x)
"""


@pytest.mark.parametrize(
    "name", ["openvino", *(pytest.param(name, marks=pytest.mark.full) for name in ("cpu", "reference"))]
)
def test_of_a_vendor_that_was_made_active(name: str) -> None:
    subprocess.run([sys.executable, "-c", CODE.format(name=name)], check=True, timeout=300)
