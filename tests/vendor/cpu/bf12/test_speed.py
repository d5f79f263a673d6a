"""Whether weights are packed in 12 bits depends on a measurement of this CPU."""

import logging

import pytest

from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.bf12 import speed


@pytest.fixture(autouse=True)
def anew():
    speed.is_faster.cache_clear()
    yield
    speed.is_faster.cache_clear()


@pytest.mark.parametrize(("most_rows", "measured"), [(1, [1]), (7, [1, 2, 4]), (64, [1, 2, 4, 8, 16, 32])])
def test_it_measures_the_rows_that_a_batch_may_have(most_rows, measured):
    if native.why_not():
        pytest.skip("needs the C++ kernels")
    found = speed.speedups(most_rows)
    assert list(found) == measured
    assert all(0.01 < faster < 100 for faster in found.values())


@pytest.mark.parametrize(
    ("speedups", "most_rows", "is_faster"),
    [
        ({1: 1.25}, 1, True),
        ({1: 1.25, 2: 1.1, 4: 0.8, 8: 0.8}, 8, False),
        ({1: 1.3, 2: 1.2, 4: 1.1, 8: 1.0}, 8, True),
        ({1: 1.03}, 1, False),
    ],
)
def test_the_average_over_all_rows_decides(speedups, most_rows, is_faster, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(speed, "speedups", lambda rows: asked.append(rows) or speedups)
    with caplog.at_level(logging.INFO, "dlinfer"):
        assert [speed.is_faster(most_rows, 2) for _ in range(2)] == [is_faster] * 2
    assert asked == [most_rows]
    assert ("packed in 12 bits" in caplog.text) == is_faster
    assert f"{speedups[1]:.2f} with 1" in caplog.text


def test_without_the_kernels_weights_stay(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    assert speed.speedups(8) == {}
    assert speed.is_faster(8, 2) is False
