"""A run that was interrupted goes on where it stopped; what was found of other code is not taken for today's."""

import json

import pytest

from dlinfer.conformance import apart, journal
from dlinfer.conformance.result import PASSED, Result

ONE = Result("rms_norm", "float32", "2-d", "values", PASSED, seconds=0.5)


def test_a_line_that_was_being_written_is_left_out(tmp_path):
    file = tmp_path / "folder" / "results"
    journal.begin(file, "key", [ONE])
    journal.add(file, ONE)
    file.write_text(file.read_text()[:-20])
    assert journal.read(file) == ("key", [ONE])


@pytest.mark.parametrize("text", ["", "[]\n", "{}\n", "not a journal"])
def test_another_file_holds_nothing(tmp_path, text):
    file = tmp_path / "results"
    file.write_text(text)
    assert journal.read(file) == ("", [])
    assert journal.read(tmp_path / "none") == ("", [])


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path):
    file = tmp_path / "results"
    asked = {"ops": ["silu_mul"], "checks": ["values"], "journal": file}
    first = apart.run("reference", **asked)
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + len(first.results)
    marked = json.loads(lines[1]) | {"detail": "from the file"}
    file.write_text("\n".join([lines[0], json.dumps(marked), *lines[2:4]]) + "\n")

    told = []
    second = apart.run("reference", **asked, progress=lambda done, total, result: told.append(done))
    assert told == list(range(4, len(first.results) + 1))
    assert [one.asked for one in second.results] == [one.asked for one in first.results]
    assert second.results[0].detail == "from the file"

    key = json.dumps({"key": "of other code"})
    file.write_text("\n".join([key, *lines[1:]]) + "\n")
    third = apart.run("reference", **asked)
    assert len(third.results) == len(first.results) and third.results[0].detail == ""
