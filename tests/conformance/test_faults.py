"""Each fault of the list, put into a copy of the cpu vendor, breaks a claim; the copy without one breaks none."""

from dataclasses import replace

import pytest

from dlinfer.conformance import here
from dlinfer.conformance.plan import CHECKS
from dlinfer.vendor import discovery
from tests.conformance.faults import FAULTS, Fault, vendor_with


def test_there_are_forty_and_more():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_caught(fault: Fault, monkeypatch):
    monkeypatch.setitem(discovery._loaded, "faulty", vendor_with(fault))
    report = here.run("faulty", ops=[fault.op], checks=fault.caught)
    assert not report.holds
    assert {one.check for one in report.failures} & set(fault.caught)
    assert {one.op for one in report.failures} == {fault.op}


def test_a_copy_without_a_fault_holds(monkeypatch):
    copy = replace(discovery.get("cpu"), name="faulty")
    monkeypatch.setitem(discovery._loaded, "faulty", copy)
    checks = [
        check.name for check in CHECKS if check.eager and check.name not in ("leaks", "implementations")
    ]
    report = here.run("faulty", ops=["rms_norm", "fill_kv_cache", "gated_delta_rule"], checks=checks)
    assert report.holds
    assert {one.check for one in report.results if one.state == "passed"} == set(checks)
