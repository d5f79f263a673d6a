"""Weights of few bits stay as they are packed: measured resident memory of LMDeploy's processes, for each packing."""

from pathlib import Path

import pytest

from benchmarks.packed_memory import BOUND, PACKINGS, measure

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1500)]

MEGABYTES = 400
MODES = ["eager", "graph"]  # a process that compiles keeps some MiB more a layer: docs/results/memory.md


@pytest.mark.parametrize("packing", PACKINGS)
def test_resident_memory_is_that_of_packed_weights_and_cache(packing: str, tmp_path: Path):
    rows = list(measure(packing, MODES, MEGABYTES, "bfloat16", tmp_path))
    assert [row["mode"] for row in rows] == MODES
    for row in rows:
        print(row)
        assert row["inside"] == "PASS", row
        assert row["over"] <= BOUND * (row["weights"] + row["cache"]), row
    assert not list(tmp_path.iterdir())
