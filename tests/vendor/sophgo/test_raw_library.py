"""What is said of the C library itself, shown on it without anything of dlinfer's between (tests/vendor/sophgo/raw)."""

import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer.vendor.sophgo.runtime import emulator
from tests.waiting import SECONDS

RAW = Path(__file__).parent / "raw"


@pytest.mark.full  # what the library does, which ours is written around
@pytest.mark.parametrize(("chip", "copies"), [("bm1684x", True), ("bm1688", False)])
def test_bm_memcpy_d2d_byte_ends_bm1688s_emulator(bmodel, chip, copies):
    """Why ``Chip.copy`` goes through the host in an emulator."""
    done = subprocess.run(
        [sys.executable, "-S", str(RAW / "copy_on_bm1688.py"), str(emulator.folder(chip)), str(bmodel(chip))],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert "copying" in done.stdout
    assert ("copied True" in done.stdout) is copies
    assert (done.returncode == 0) is copies


@pytest.mark.full
@pytest.mark.parametrize(
    ("chip", "flags", "sound"), [("bm1684x", "own", False), ("bm1684x", "1", True), ("bm1688", "own", True)]
)
def test_bmruntime_runs_a_stage_in_memory_that_it_gave_back(bmodel, chip, flags, sound):
    """Why ``child/working_memory.py`` stands between BMRuntime and bmlib. Flags do not make it right: where they do so
    for a stage, they do not for another bmodel, and unloading then ends the process."""
    given = [str(emulator.folder(chip)), str(bmodel(f"growing {chip}")), "mlp", "1024", flags]
    try:
        done = subprocess.run(
            [sys.executable, "-S", str(RAW / "growing_stages.py"), *given],
            capture_output=True,
            text=True,
            timeout=SECONDS if sound else 10,  # three runs take less than a second
            check=False,
        )
    except subprocess.TimeoutExpired:
        assert not sound
    else:
        assert (done.stdout.count("as the first") == 3 and done.returncode == 0) is sound, done.stdout
