"""The benchmarks' stopwatch and statistics."""

import json

import pytest

from benchmarks.timing import interleave, publish, ratio


def test_every_round_calls_everybody_once():
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name)) for name in ("a", "b", "c")}
    samples = interleave(calls, pairs=7, warmup=2)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 7, "b": 7, "c": 7}
    rounds = [tuple(called[i : i + 3]) for i in range(0, len(called), 3)]
    assert len(rounds) == 9
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 1


def test_ratio_of_equal_rounds_is_certain():
    assert ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == (2.0, 2.0, 2.0)


def test_ratio_pairs_rounds_not_sorted_samples():
    # The machine was ten times slower in the second round; that round says 2, as the others do.
    assert ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]).median == 2.0


def test_interval_covers_the_spread_and_is_reproducible():
    ones = [1.0] * 15
    noisy = [1.0 + i / 10 for i in range(15)]
    found = ratio(noisy, ones)
    assert found.median == pytest.approx(1.7)
    assert 1.0 <= found.low < found.median < found.high <= 2.4
    assert ratio(noisy, ones) == found


def test_samples_of_different_runs_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_the_last_line_is_json(capsys):
    publish("title", [{"size": "2x3", "GB/s": 1.25, "against": ratio([2.0], [1.0])}])
    *table, last = capsys.readouterr().out.splitlines()
    assert table[-1].split() == ["2x3", "1.2", "2.00", "[2.00,", "2.00]"]
    found = json.loads(last)
    assert found["benchmark"] == "title"
    assert found["rows"] == [
        {"size": "2x3", "GB/s": 1.25, "against": {"median": 2.0, "low": 2.0, "high": 2.0}}
    ]
