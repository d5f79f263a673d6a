"""What the gate's last line says."""

from tests.not_run import line

JUNIT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><skipped message="needs the toolchain sophgo, and there is none: make toolchains"/></testcase>
<testcase name="d"><skipped message="needs the toolchain sophgo, and it is damaged: make toolchains"/></testcase>
<testcase name="e"><skipped message="this CPU has no AMX"/></testcase>
</testsuite></testsuites>"""


def test_each_reason_is_counted(tmp_path):
    (tmp_path / "tests.xml").write_text(JUNIT)
    assert line(tmp_path / "tests.xml", "no CPython 3.10") == (
        "ci: of 5 tests 3 did not run (no CPython 3.10): 2: needs the toolchain sophgo; 1: this CPU has no AMX"
    )


def test_nothing_was_left_out(tmp_path):
    (tmp_path / "tests.xml").write_text('<testsuite><testcase name="a"/></testsuite>')
    assert line(tmp_path / "tests.xml", "") == "ci: of 1 tests 0 did not run: none"
