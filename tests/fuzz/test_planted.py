"""The fuzzer finds copies of faults that dlinfer once had, each within two minutes on two quiet cores."""

from pathlib import Path

import pytest

from tests.fuzz.drive import Drive
from tests.fuzz.planted import FAULTS


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path):
    engine, _ = FAULTS[name]
    drive = Drive((engine,), 1, tmp_path, name, until_planted=True)
    drive.run(120, workers=2, quiet=True)
    assert drive.planted is not None, (
        f"{drive.counts['programs']} programs, {drive.counts['found']} of them differ"
    )
    print(f"{name}: {drive.planted.seconds:.0f} s, program {drive.planted.seeds[0]}: {drive.planted.detail}")
