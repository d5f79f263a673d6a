"""A worker's end is an answer, too."""

from pathlib import Path

import pytest

from tests.waiting import ended, until
from tests.workers import ROOT, Ended, Worker

ECHO = "tests.echo_job"


def test_a_crash_and_a_hang_are_told_apart_and_the_next_job_is_done(tmp_path: Path):
    with Worker(ECHO, tmp_path) as worker:
        first = worker.ask({}, 60)["process"]
        assert worker.ask({}, 60)["process"] == first
        for kind, do in (("crash", "abort"), ("hang", "sleep")):
            with pytest.raises(Ended) as raised:
                worker.ask({"do": do, "say": kind}, 2 if kind == "hang" else 60)
            assert raised.value.kind == kind
            assert f"said {kind}" in str(raised.value)
            assert worker.ask({}, 60)["process"] != first


def test_a_process_is_replaced_after_some_jobs(tmp_path: Path):
    with Worker(ECHO, tmp_path, jobs=2) as worker:
        processes = [worker.ask({}, 60)["process"] for _ in range(4)]
    assert processes[0] == processes[1] != processes[2] == processes[3]


def test_what_was_printed_for_a_job_is_told_apart(tmp_path: Path):
    with Worker(ECHO, tmp_path, {"SEEN": "here"}, jobs=1) as worker:
        worker.ask({"say": "one"}, 60)
        since = worker.logged()
        worker.ask({"say": "two"}, 60)
        assert "one here" in worker.log() and "one" not in worker.log(since)
        assert "two here" in worker.log(since)


def test_what_is_on_this_process_s_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another release of LMDeploy is put under test so."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    with Worker(ECHO, tmp_path) as worker:
        path = worker.ask({}, 60)["path"]
    assert path[path.index(str(tmp_path / "elsewhere")) + 1] == str(ROOT)


def test_an_end_is_the_end_of_what_it_has_started(tmp_path: Path):
    with Worker(ECHO, tmp_path) as worker:
        orphan = worker.ask({"do": "orphan"}, 60)["orphan"]
        assert not ended(orphan)
    until(lambda: ended(orphan))
