"""A worker's process that the system refuses to start."""

import gc
import os
import sys
from pathlib import Path

import pytest

from dlinfer.vendor.sophgo.errors import SophgoWorkerError
from dlinfer.vendor.sophgo.runtime.worker import Worker


def test_a_worker_that_cannot_be_started(monkeypatch, tmp_path):
    """Nothing of it stays open."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(SophgoWorkerError, match=r"stand-in could not be started: .*No such file"):
        Worker("a stand-in", tmp_path, emulated=True)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SophgoWorkerError):
            Worker("a stand-in", tmp_path, emulated=True)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_files_are_left_to_start_one_with(monkeypatch, tmp_path):
    def none(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    with pytest.raises(SophgoWorkerError, match="Too many open files"):
        Worker("a stand-in", Path(tmp_path), emulated=True)
