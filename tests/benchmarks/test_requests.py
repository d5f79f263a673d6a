"""Requests of mixed lengths, and what is noted of their tokens."""

import pytest

from benchmarks import requests
from benchmarks.requests import LENGTHS, TOKENS, Arrivals, mixed


def test_every_length_meets_other_answers():
    many = mixed(64)
    assert len(many) == 64 and {length for length, _ in many} == set(LENGTHS)
    assert {tokens for length, tokens in many if length == LENGTHS[0]} == set(TOKENS)
    assert mixed(3) == many[:3]


def test_times_of_tokens(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(requests.time, "perf_counter", lambda: clock[0])
    arrivals = Arrivals(2)
    for moment, request, tokens in [(11, 0, 1), (12, 1, 1), (12, 1, 0), (13, 0, 1), (16, 1, 2)]:
        clock[0] = float(moment)
        arrivals.note(request, tokens)
    assert arrivals.first == [1, 2]
    assert arrivals.gaps == [2, 2, 2]  # two tokens that come together took half the time each
    answer = arrivals.answer()
    assert (answer["seconds"], answer["tokens"]) == (6, 5)
    assert answer["gap"] == {"p50": 2, "p90": 2, "p99": 2}


def test_percentiles():
    found = requests.percentiles([float(n) for n in range(101)])
    assert found == {"p50": pytest.approx(50), "p90": pytest.approx(90), "p99": pytest.approx(99)}
