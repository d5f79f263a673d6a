"""When documented limits explain the differences of a program."""

from contextlib import nullcontext

import pytest

from tests.fuzz import check
from tests.fuzz.compare import Difference
from tests.fuzz.generate import generate


def wrong(*calls: int) -> list[Difference]:
    return [Difference("value", call, "result 0") for call in calls]


@pytest.mark.parametrize(
    ("eager", "lines", "explained"),
    [
        ((1, 2), {"a": (0,)}, "a"),  # the first call runs torch's kernel, the others the engine's
        ((1, 2), {"a": (0, 2), "b": (0, 1)}, "a; b"),
        ((1, 2), {"a": (), "b": (0, 1)}, "a"),
        ((1, 2), {"a": (0, 2), "b": (2,)}, ""),
        ((1,), {}, ""),
    ],
)
def test_each_call_is_eagers_or_as_a_line_says(monkeypatch, eager, lines, explained):
    differing = iter([wrong(*calls) for calls in lines.values()])
    monkeypatch.setattr(check.limits, "documented", lambda _: [(line, nullcontext()) for line in lines])
    monkeypatch.setattr(check, "eagerly", lambda _: [])
    monkeypatch.setattr(check, "differences", lambda *_: next(differing))
    monkeypatch.setattr(check.compilers, "common", lambda *_: False)
    monkeypatch.setattr(check, "Budget", lambda _: None)
    assert check._documented(generate(1), "inductor", wrong(*eager), []) == explained
