"""The long lane goes on where it stopped, and only with the code that it stopped with."""

import re
from pathlib import Path

import pytest

from tests.e2e import ledger as module
from tests.e2e.ledger import Ledger


def test_only_passes_of_this_code_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "matrix.jsonl")
    assert not ledger.passed("a")
    assert not ledger.last()
    monkeypatch.setattr(module, "code_fingerprint", lambda: "one")
    ledger.record("a", "one", 1.0, [])
    ledger.record("b", "one", 1.0, ["a token differs"])
    assert ledger.passed("a") == ledger.last()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC at commit ([0-9a-f]{10,}\+?|unknown)", ledger.last())
    assert not ledger.passed("b")
    ledger.record("b", "one", 1.0, [])
    assert ledger.passed("b"), "the latest result counts"
    monkeypatch.setattr(module, "code_fingerprint", lambda: "two")
    assert not ledger.passed("a")
    assert ledger.last(), "with whatever code"


def test_a_result_is_dropped_when_the_code_changed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "matrix.jsonl")
    monkeypatch.setattr(module, "code_fingerprint", lambda: "two")
    ledger.record("a", "one", 1.0, [])
    assert ledger.entries() == {}
