"""The table of ``make conformance``: every vendor's numbers, and why a vendor has none."""

import pytest

from dlinfer.vendor import discovery
from tests.conformance import run_all

FOUND = {
    "counts": {"passed": 5, "declined": 2, "failed": 1, "skipped": 9, "unclaimed": 4},
    "seconds": 12.4,
}


def test_a_row_counts_what_was_asked():
    made = run_all.table({"cpu": FOUND}, {"sophgo": "no toolchain"})
    (line,) = [one for one in made.splitlines() if one.startswith("| cpu ")]
    assert line.startswith("| cpu | 8 | 5 | 2 | 1 | 12 | real runtime | torch ")
    assert "sophgo was not asked: no toolchain." in made


def test_the_table_takes_the_place_of_the_last_one():
    page = run_all.with_table(run_all.DOCUMENT.read_text(), "a table")
    again = run_all.with_table(page, "another \\1")
    assert "another \\1" in again and "a table\n" not in again
    with pytest.raises(ValueError, match="has no"):
        run_all.with_table("a page", "a table")


def test_every_vendor_with_a_simulated_device_is_asked_by_default():
    built_in = {name for name in discovery.names() if discovery.get(name).proofs is not None}
    assert built_in <= set(run_all.USUAL)
    for asked in run_all.VENDORS.values():
        assert discovery.get(asked.vendor).name == asked.vendor
        assert not asked.checks or asked.left_out
