"""Drafts are verified where they gain more than they cost, by the times and the acceptance that were measured."""

import random

import pytest

from dlinfer.framework.lmdeploy_ext.ngram.gain import Drafts, StepTimes
from dlinfer.framework.lmdeploy_ext.ngram.lookup import Match

MOST = 7
MATCH = Match(3, 10)
STEPS = 2000


class Run:
    """Decoding of one sequence that has a match at each step. A plain step takes a second.

    price: what each row of a draft adds to it. right: how probable a draft token is accepted; it may change.
    """

    def __init__(self, price: float, seed: int = 0) -> None:
        self.price = price
        self.times, self.drafts, self.draw = StepTimes(), Drafts(), random.Random(seed)

    def accepted(self, length: int, right: float) -> int:
        return next((place for place in range(length) if self.draw.random() >= right), length)

    def speed(self, right: float, steps: int = STEPS) -> float:
        """Tokens per second."""
        seconds = tokens = 0.0
        for _ in range(steps):
            cost = self.times.draft_cost(1)
            length = 0 if cost is None else self.drafts.length(MATCH, cost, MOST)
            assert 0 <= length <= MOST
            accepted = self.accepted(length, right)
            spent = 1 + self.price * length
            self.times.note(1, length, spent * self.draw.uniform(0.9, 1.1))
            if length:
                self.drafts.note(length, accepted)
            seconds += spent
            tokens += 1 + accepted
        return tokens / seconds

    def best(self, right: float) -> float:
        """Tokens per second with the best fixed length."""
        return max(
            sum(right**place for place in range(length + 1)) / (1 + self.price * length)
            for length in range(MOST + 1)
        )


PRICES = [0.0, 0.02, 0.1, 0.3, 1.0]


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("right", [0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0])
def test_not_slower_than_without_and_nearly_as_fast_as_the_best_length(price: float, right: float):
    run = Run(price)
    speed = run.speed(right)
    assert speed > 0.97
    assert speed > 0.85 * run.best(right)


@pytest.mark.parametrize("price", PRICES[1:-1])
def test_it_finds_out_when_a_text_begins_to_repeat_and_when_it_ends(price: float):
    run = Run(price)
    run.speed(0.0)
    assert run.speed(1.0, 400) > 0.7 * run.best(1.0)
    assert run.speed(0.0, 400) > 0.95


@pytest.mark.parametrize("sequences", [1, 8, 64])
def test_the_cost_is_that_of_a_row_in_a_step_of_so_many(sequences: int):
    """A step of 10 ms and 1 ms for each row, some of which another process has interrupted."""
    times, draw = StepTimes(), random.Random(0)
    assert times.draft_cost(sequences) is None
    for number in range(300):
        drafts = draw.choice([0, 0, 3, 7])
        seconds = (10 + sequences + drafts) * 1e-3 * (5 if number % 10 == 0 else 1)
        times.note(sequences, drafts, seconds)
    assert times.draft_cost(sequences) == pytest.approx(1.1 * sequences / (10 + sequences), rel=0.2)


def test_the_cost_is_unknown_before_a_step_without_drafts():
    times = StepTimes()
    times.note(1, 5, 100.0)
    assert times.draft_cost(1) is None
    times.note(1, 0, 1.0)
    assert times.draft_cost(1) == pytest.approx(0.1)
    assert times.draft_cost(2) is None


def test_long_matches_are_judged_by_themselves():
    drafts = Drafts()
    for _ in range(100):
        if drafts.length(Match(2, 5), 0.1, MOST):
            drafts.note(MOST, 0)
        assert drafts.length(Match(5, 5), 0.1, MOST) > 0
        drafts.note(MOST, MOST)
    assert drafts.length(Match(5, 5), 0.1, MOST) == MOST
