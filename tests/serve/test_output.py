"""Lines that nobody reads, or that cannot be printed, end nothing."""

import logging
import os
import sys

import pytest

from dlinfer.serve.output import LogLines, say
from tests.serve.processes import ROOT, ProcessTree

READER_GONE = """
import os
from dlinfer.serve.output import say
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
for number in range(3):
    say("x" * 100_000)
assert os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev
"""


def test_the_reader_is_gone():
    """The status is 0: the flush of stdout at the end of the process succeeds, too."""
    with ProcessTree([sys.executable, "-c", READER_GONE], PYTHONPATH=str(ROOT)) as child:
        assert child.wait(60) == 0, child.output()
        assert child.output() == ""


def test_a_full_disk_and_a_closed_stdout(monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        say("dropped")
        assert os.fstat(full.fileno()).st_rdev == os.stat("/dev/full").st_rdev  # space may come back
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    say("dropped")


def test_log_records(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = LogLines()
    handler.setFormatter(logging.Formatter("dlinfer serve: %(message)s"))
    record = logging.LogRecord("dlinfer", logging.INFO, "", 0, "replica %d is ready", (1,), None)
    handler.emit(record)
    record.args = ("two", "arguments")
    handler.emit(record)
    assert capsys.readouterr().out == "dlinfer serve: replica 1 is ready\n"
