"""The document and the drawing of a run, from made-up figures."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy
import pytest

from benchmarks.peers import report
from benchmarks.serving import rows_of
from benchmarks.timing import Ratio

ORDERS = [
    {"work": "prefill", "batch": 1, "length": 512, "tokens": 1},
    {"work": "decode", "batch": 1, "length": 512, "tokens": 24},
]
MACHINE = {"cpu": "A (R) CPU @ 2.0", "capability": "AVX512", "threads": 2, "torch": "2.12.1"}


def found() -> dict[str, Any]:
    def answers(seconds: float) -> list[dict[str, float]]:
        return [{"seconds": seconds, "rss": 2**30}] * 3

    results = [
        {"dlinfer": answers(0.5), "peer": answers(1.0)},
        {"dlinfer": answers(2.0), "peer": answers(1.0)},
    ]
    rows = [report.plain(row) for row in rows_of(["dlinfer", "peer"], ORDERS, results, "dlinfer")]
    return {
        "machine": MACHINE,
        "read bandwidth": 20e9,
        "product peak": ["bfloat16", 300e9],
        "weights": 10**9,
        "rows": {"bf16": rows},
        "settings": {"bf16": {"DLINFER_CPU_WEIGHTS": "bf12"}},
    }


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would draw; the document is written to ``tmp_path``."""
    commands: list[list[str]] = []
    monkeypatch.setattr(report, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.setattr(report, "DOCUMENT", tmp_path / "peers.md")
    monkeypatch.setattr(report, "python_of", lambda name: f"python of {name}")
    monkeypatch.setattr(report.subprocess, "run", lambda command, check: commands.append(command))
    return commands


def test_a_row_is_plain():
    assert report.plain({"a": Ratio(2.0, 1.0, 3.0), "b": "c"}) == {"a": [2.0, 1.0, 3.0], "b": "c"}


def test_the_document(documents, tmp_path):
    report.write(found())
    text = (tmp_path / "peers.md").read_text()
    assert "## A (R) CPU @ 2.0, AVX512, 2 threads" in text
    assert "at most 20.0 steps a second" in text
    assert "Ours with `DLINFER_CPU_WEIGHTS=bf12`." in text
    assert "| prefill batch 1 x 512 | peer | 1024.0 | 512.0 | 2.00 [2.00, 2.00] | 1.0, 1.0 |" in text
    assert "| decode batch 1 x 512 | peer | 12.0 | 24.0 | 0.50 [0.50, 0.50] | 1.0, 1.0 |" in text
    kept = tmp_path / "benchmarks" / "a-r-cpu-2-0-avx512-2-threads.json"
    assert json.loads(kept.read_text()) == found()
    (command,) = documents
    assert (command[0], Path(command[1]).name, command[2]) == ("python of plots", "plot.py", str(kept))
    assert f"(benchmarks/{kept.stem}.svg)" in text


def test_what_was_not_run_again_stays(documents, tmp_path):
    report.write(found())
    again = found()
    again["rows"], again["settings"] = {"int8": again["rows"]["bf16"][:1]}, {"int8": {}}
    report.write(again)
    text = (tmp_path / "peers.md").read_text()
    assert text.count("Ours with") == 1
    assert text.index("### bf16") < text.index("### int8")
    other = found() | {"machine": MACHINE | {"cpu": "Another"}}
    report.write(other)
    text = (tmp_path / "peers.md").read_text()
    assert text.index("## A (R) CPU") < text.index("## Another")


def test_another_kind_of_model_has_a_section_of_its_own(documents, tmp_path):
    report.write(found() | {"model": "moe"})
    report.write(found() | {"model": "dense"})
    folder = tmp_path / "benchmarks"
    names = ["a-r-cpu-2-0-avx512-2-threads-moe.json", "a-r-cpu-2-0-avx512-2-threads.json"]
    assert sorted(one.name for one in folder.glob("*.json")) == names
    text = (tmp_path / "peers.md").read_text()
    dense, moe = (text.index(f"## A (R) CPU @ 2.0, AVX512, 2 threads{end}") for end in ("\n", ": moe\n"))
    assert dense < text.index("Shape of Qwen2.5-0.5B.") < moe < text.index("A mixture of experts,")


def test_the_drawing(tmp_path, monkeypatch):
    """By a matplotlib that remembers: an axis a precision, bars in the order of the works, and memory's limit."""
    library, pyplot = MagicMock(), MagicMock()
    library.pyplot = pyplot
    axis, figure = MagicMock(), MagicMock()
    axes = numpy.empty((1, 1), dtype=object)
    axes[0, 0] = axis
    pyplot.subplots.return_value = (figure, axes)
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found()))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(path)])
    runpy.run_path(str(Path(report.__file__).with_name("plot.py")), run_name="__main__")
    bars = {call.kwargs["label"]: call.args for call in axis.bar.call_args_list}
    assert bars["ours"][1] == [1024.0, 12.0]
    assert bars["peer"][1] == [512.0, 24.0]
    assert bars["ours"][0][0] < 0 < bars["peer"][0][0]  # side by side around the work's place
    (limit,) = axis.hlines.call_args_list
    assert limit.args == (20.0, 0.6, 1.4)
    assert figure.savefig.call_args.args == (path.with_suffix(".svg"),)
