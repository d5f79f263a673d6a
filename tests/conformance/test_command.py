"""``dlinfer conformance``: its exit status and files, and vendors that end or block the process that asks them."""

import json
import os
from xml.etree import ElementTree

import pytest

from dlinfer.cli import conformance_view, main
from dlinfer.conformance import apart
from dlinfer.conformance.errors import ConformanceError
from dlinfer.conformance.report import html, junit
from dlinfer.conformance.result import DECLINED, FAILED, PASSED, UNCLAIMED, Header, Report, Result
from tests.plugins.builder import MINI, write_plugin

DEADLY = """
import os, signal, time
from dlinfer.vendor import Probe, Vendor

def rms_norm(x, weight, eps):
    from dlinfer.ops import registry
    if tuple(x.shape) == (5, 48):
        {deed}
    return registry()["rms_norm"].reference(x, weight, eps)

VENDOR = Vendor("deadly", "cpu", "", lambda: Probe(True, ""), lambda: {{"rms_norm": rms_norm}})
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed(source)`` puts a vendor "deadly" where child processes find it."""

    def install(deed: str) -> None:
        write_plugin(tmp_path / "site", "deadly", DEADLY.format(deed=deed))
        path = os.pathsep.join(filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH"))))
        monkeypatch.setenv("PYTHONPATH", path)

    return install


@pytest.mark.slow
def test_a_kernel_that_ends_the_process_costs_its_check_alone(installed):
    installed("os.kill(os.getpid(), signal.SIGSEGV)")
    report = apart.run("deadly", ops=["rms_norm"], checks=["values"])
    dead = [one for one in report.results if "SIGSEGV" in one.detail]
    assert [(one.dtype, one.sample) for one in dead] == [
        (dtype, "2-d") for dtype in ("float32", "float16", "bfloat16")
    ]
    others = {one.state for one in report.results if one not in dead}
    assert others == {PASSED} and len(report.results) == 25
    assert not report.holds


@pytest.mark.slow
def test_a_kernel_that_does_not_return_is_ended(installed):
    installed("time.sleep(1000) if x.dtype.itemsize == 4 else None")
    report = apart.run("deadly", ops=["rms_norm"], checks=["values"], timeout=12)
    (fault,) = report.failures
    assert "after 12 seconds" in fault.detail
    assert fault.sample == "2-d"


def test_the_command_writes_every_form(tmp_path, monkeypatch, capsys):
    path = os.pathsep.join(filter(None, (str(MINI), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    files = {form: tmp_path / f"found.{form}" for form in ("json", "junit", "html")}
    options = [word for form, file in files.items() for word in (f"--{form}", str(file))]
    # The mini vendor rounds once where the op says twice, so bfloat16 is close and float16 declined.
    status = main(["conformance", "mini", "--op", "rms_norm", "--check", "values", *options])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "mini: every claim holds" in out and "float16 is not served" in out
    found = json.loads(files["json"].read_text())
    assert found["vendor"] == "mini" and found["distribution"] == "dlinfer-mini-vendor"
    assert found["holds"] and found["counts"][DECLINED] == 8
    suites = ElementTree.fromstring(files["junit"].read_text())
    assert suites.get("failures") == "0" and suites.get("skipped") == "8"
    assert "every claim holds" in files["html"].read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nobody"], "'nobody'"),
        (["cpu", "--op", "rms_nrom"], "no op 'rms_nrom'"),
        (["cpu", "--check", "vlaues"], "no check 'vlaues'"),
    ],
)
def test_what_cannot_be_asked_is_said(argv, words, capsys):
    assert main(["conformance", *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_vendor_that_cannot_run_here_is_no_failure_of_a_claim(tmp_path, monkeypatch):
    source = (
        'from dlinfer.vendor import *\nVENDOR = Vendor("far", "cpu", "", lambda: Probe(False, "no card"))'
    )
    write_plugin(tmp_path, "far", source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    with pytest.raises(ConformanceError, match="no card"):
        apart.run("far")


def report(*results: Result) -> Report:
    return Report(Header("acme", "dlinfer-acme", "1.0", "cpu", "0", "2", False, True), list(results))


def test_files_hold_whatever_a_vendor_says():
    crooked = Result("rms_norm", "float32", "<a & b>", "values", FAILED, "said \x00 <b>\ud800")
    made = report(crooked, Result("rms_norm", "float32", "c", "values", PASSED))
    suites = ElementTree.fromstring(junit.text(made))
    assert suites.get("tests") == "2" and suites.get("failures") == "1"
    failure = suites.find(".//failure")
    assert failure is not None and "<b>" in (failure.get("message") or "")
    page = html.page(made)
    assert "&lt;a &amp; b&gt;" in page and "<b>" not in page and "some claims do not hold" in page
    page.encode()


def test_without_a_terminal_each_tested_op_and_each_failure_gets_a_line(capsys):
    results = [
        Result("linear", "float32", "", "claim", UNCLAIMED),
        Result("rms_norm", "float32", "2-d", "values", PASSED),
        Result("rms_norm", "float32", "2-d", "views", FAILED, "NaN was read"),
        Result("silu_and_mul", "float32", "2-d", "values", DECLINED),
    ]
    with conformance_view.progress() as told:
        for done, result in enumerate(results, 1):
            told(done, 4, result)
    assert [line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines()] == [
        ["2/4", "rms_norm"],
        ["3/4", "rms_norm [float32, 2-d] views: NaN was read"],
        ["4/4", "silu_and_mul"],
    ]


def test_a_vendor_s_reason_is_printed_as_it_is(capsys):
    reason = "acme's compiler has no dlinfer.rms_norm.default"
    conformance_view.show(report(Result("rms_norm", "float32", "c", "graph", DECLINED, reason)))
    assert f"declined graph: {reason} (rms_norm 1)" in capsys.readouterr().out


def test_nothing_passed_is_not_a_pass():
    assert not report().holds
    assert "nothing passed" in html.page(report())
