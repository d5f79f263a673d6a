"""What is said of the C library itself, shown on it without anything of dlinfer's between (tests/vendor/sophgo/raw)."""

import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer.vendor.sophgo.runtime import emulator

RAW = Path(__file__).parent / "raw"


@pytest.mark.parametrize(("chip", "copies"), [("bm1684x", True), ("bm1688", False)])
def test_bm_memcpy_d2d_byte_ends_bm1688s_emulator(bmodel, chip, copies):
    """Why ``Chip.copy`` goes through the host in an emulator."""
    done = subprocess.run(
        [sys.executable, "-S", str(RAW / "copy_on_bm1688.py"), str(emulator.folder(chip)), str(bmodel(chip))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "copying" in done.stdout
    assert ("copied True" in done.stdout) is copies
    assert (done.returncode == 0) is copies
