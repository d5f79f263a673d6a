"""The matrices' own parts: what counts as equal, what counts as a size-1 variant, what is remembered."""

import sys
from pathlib import Path

import pytest
import torch

from tests.graph.matrix import ledger, op_table, samples, verdict
from tests.graph.matrix.calls import BATCHES, LENGTHS, sizes
from tests.graph.matrix.ledger import Ledger, shard
from tests.graph.matrix.models import ARCHITECTURES
from tests.graph.matrix.observer import dimensions_of_one, varying_dimensions
from tests.graph.matrix.processes import Worker

KINDS = {"decoder", "encoder", "encoder-decoder", "moe", "mla", "vision", "speech", "state-space"}


def test_the_list_of_architectures_is_as_wide_as_promised() -> None:
    assert len(ARCHITECTURES) >= 40
    assert {architecture.kind for architecture in ARCHITECTURES} == KINDS
    assert len({architecture.name for architecture in ARCHITECTURES}) == len(ARCHITECTURES)


def test_sizes_are_three_batches_by_four_lengths() -> None:
    assert len(sizes()) == len(BATCHES) * len(LENGTHS) == 12


def test_copy_keeps_strides_and_shared_memory() -> None:
    base = torch.arange(12.0).view(3, 4)
    given = (base.t(), [base[1:], base[0].expand(2, 4)], 3)
    twin = samples.copy(given)
    twin[0][0, 1] = -1.0
    assert twin[1][0][0, 0] == -1.0 and base[1, 0] == 4.0
    assert twin[0].stride() == (1, 4) and twin[1][1].stride() == (0, 1) and twin[2] == 3


@pytest.mark.parametrize(
    ("got", "want", "kind"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), "equal"),
        (torch.tensor([1.0 + 1e-6]), torch.tensor([1.0]), "close"),
        (torch.tensor([1.1]), torch.tensor([1.0]), "wrong"),
        (torch.ones(2, 2).t(), torch.ones(2, 2), "wrong"),
        (torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int64), "wrong"),
        ((torch.ones(1), 2), (torch.ones(1), 3), "wrong"),
        ([torch.ones(1)], (torch.ones(1),), "wrong"),
    ],
)
def test_difference(got: object, want: object, kind: str) -> None:
    assert samples.difference(got, want)[0] == kind


def test_undefined_values_are_compared_by_form_only() -> None:
    assert samples.difference(torch.zeros(2), torch.ones(2), values=False)[0] == "equal"
    assert samples.difference(torch.zeros(3), torch.ones(2), values=False)[0] == "wrong"


def test_size_one_counts_only_in_dimensions_that_vary() -> None:
    varying = varying_dimensions([{"ids.0": (2, 5), "mask.0": (1, 5)}, {"ids.0": (2, 1), "mask.0": (1, 7)}])
    assert varying == {("ids.0", 1), ("mask.0", 1)}
    assert dimensions_of_one({"ids": torch.ones(2, 1), "mask": torch.ones(1, 7)}) & varying == {("ids.0", 1)}


def run(**changes: object) -> dict:
    base = {
        "backend": "dlinfer",
        "error": "",
        "max_error": 1e-6,
        "wrong": [],
        "compared": 4,
        "sweeps": [2, 0],
        "compilations": [{"frame": 0, "size_one": False}, {"frame": 0, "size_one": True}],
        "graphs": 2,
        "graph_breaks": {},
        "report": {"kernels": 3, "in_clusters": 9, "fallbacks": []},
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"wrong": ["2x5 prefill 0: 0.1"]}, "wrong: 2x5 prefill 0: 0.1"),
        ({"compilations": [{"frame": 0, "size_one": False}] * 4}, "4 compilations besides size-1 variants"),
        ({"sweeps": [2, 1]}, "1 compilations when the same sizes came again"),
        ({"graph_breaks": {"print": 1}}, "1 graph breaks, aot_eager has 0"),
        ({"report": {"fallbacks": ["aten.sort: no"]}}, "fell back: aten.sort: no"),
        ({"error": "TypeError: x"}, "TypeError: x"),
    ],
)
def test_verdict(changes: dict, problem: str | None) -> None:
    record = {"most_compilations": 3, "tested": run(**changes), "baseline": run(backend="aot_eager")}
    assert verdict.failures(record) == ([problem] if problem else [])


def test_a_crash_is_a_row_of_the_table() -> None:
    line = verdict.row(ARCHITECTURES[0], {"trouble": "died of SIGSEGV"})
    assert line[2] == "FAIL" and line[-1] == "died of SIGSEGV" and len(line) == len(verdict.HEADER)


def test_ledger_counts_only_its_lane_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ops.jsonl"
    Ledger(path, "capture").record("add float32", {"equal": 1})
    with path.open("a") as file:
        file.write('{"item": "half a li')
    assert Ledger(path, "capture").entries() == {"add float32": {"equal": 1}}
    assert Ledger(path, "engine").entries() == {}
    monkeypatch.setattr(ledger, "code_fingerprint", lambda **_: "another")
    assert Ledger(path, "capture").entries() == {}


def test_shards_cover_everything_once() -> None:
    items = [str(number) for number in range(10)]
    parts = [shard(items, index, 3) for index in (1, 2, 3)]
    assert sorted(item for part in parts for item in part) == items


def test_worker_survives_a_crash_and_a_hang() -> None:
    script = (
        "import json, os, sys, time\n"
        "for line in sys.stdin:\n"
        "    word = line.strip()\n"
        "    if word == 'crash': os.abort()\n"
        "    while word == 'hang': time.sleep(60)\n"
        "    print(json.dumps({'said': word}), flush=True)\n"
    )
    worker = Worker([sys.executable, "-c", script], limit=500.0)
    try:
        assert worker.ask("one") == {"said": "one"}
        assert worker.ask("crash") == {"trouble": "died of SIGABRT"}
        assert worker.ask("two") == {"said": "two"}
        assert worker.ask("hang", limit=1.0) == {"trouble": "did not end within 1 s"}
        assert worker.ask("three") == {"said": "three"}
    finally:
        worker.close()


def test_summary_groups_reasons_and_lists_what_is_wrong() -> None:
    tally = {
        "equal": 2,
        "close": 1,
        "unsupported": {"capture: size 7": 1},
        "wrong": 1,
        "details": ["sample 3: off"],
    }
    text = op_table.text({"add float32": tally, "mul float32": {"trouble": "died of SIGSEGV"}})
    assert text.splitlines() == [
        "3 samples pass (2 equal to the bit, 1 within tolerance), 1 unsupported, 1 wrong, 1 ops without an answer",
        "  unsupported      1 capture: size N (add)",
        "  wrong add float32: sample 3: off",
        "  wrong mul float32: died of SIGSEGV",
    ]
