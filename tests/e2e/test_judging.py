"""How logits are judged: the judge of the matrix must not let anything through."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.e2e.matrix import check_logits

EXACT = np.zeros((3, 4), np.float32)
THEIRS = EXACT + np.float32([[0.1], [0.3], [0.0]])  # transformers' own bfloat16


def verdict(ours: np.ndarray, exact: list[np.ndarray] | None = None) -> list[str]:
    class Run(SimpleNamespace):
        def __getitem__(self, step: str) -> list[list[int]]:
            return [list(ours.shape)]

    run: Any = Run(logits={"logits/0": ours})
    return check_logits("logits", run, [THEIRS], "bfloat16", exact)


def test_within_the_tolerance_of_theirs():
    assert verdict(THEIRS + np.float32(0.12)) == []


def test_beyond_it_only_as_exact_as_they_are_somewhere():
    ours = THEIRS.copy()
    ours[2] = 0.29  # far from theirs, and no further from the exact ones than they are at position 1
    assert "positions [2]" in verdict(ours)[0]
    assert verdict(ours, [EXACT]) == []
    ours[2, 1] = 0.31
    assert "positions [2]" in verdict(ours, [EXACT])[0]


def test_nothing_is_nowhere_near():
    ours = THEIRS.copy()
    ours[0, 3] = np.nan
    assert "positions [0]" in verdict(ours, [EXACT])[0]
    assert "shape" in verdict(ours[:2], [EXACT])[0]
