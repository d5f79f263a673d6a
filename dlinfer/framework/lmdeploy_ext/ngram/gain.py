"""Decide how many draft tokens of a sequence the next step verifies, from what earlier drafts gained and cost.

A draft token costs a row of the step, and gains a token if it and all drafts before it are accepted. Both are measured:
how much longer steps with drafts take, and for each sequence how many of its drafts were accepted.
"""

import math
from collections import deque
from statistics import median

from dlinfer.framework.lmdeploy_ext.ngram.lookup import Match

_FIRST_COST = 0.1
"""The cost of a draft token before any was measured, as a part of a token's cost without drafts."""
_LEAST_COST, _MARGIN = 0.03, 1.1
_KEPT_TIMES = 9
"""Number of the latest measurements whose median counts. Other processes may have interrupted some of them."""
_KEPT_DRAFT = 0.95
"""Factor of the weight of all earlier drafts of a sequence at each new one, so the last 20 count most."""
_IMPROBABLE, _KEPT_WHEN_IMPROBABLE = 0.05, 0.5
"""If so many drafts in a row have no accepted token that this was improbable, the earlier successes are history."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128
"""Number of matches without a draft between two trials."""


class StepTimes:
    """Measures what verifying a draft token costs in an engine."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._of_drafts: deque[float] = deque(maxlen=_KEPT_TIMES)

    def note(self, sequences: int, drafts: int, seconds: float) -> None:
        """Record a step that decoded so many sequences and verified so many draft tokens."""
        if drafts == 0:
            self._plain.setdefault(sequences, deque(maxlen=_KEPT_TIMES)).append(seconds)
        elif sequences in self._plain:
            self._of_drafts.append((seconds - median(self._plain[sequences])) / drafts)

    def draft_cost(self, sequences: int) -> float | None:
        """Return the time of a draft token, divided by the time per token of a step without drafts; at most 1.

        It is 10 % more than measured, so that drafts that hardly pay are left out.
        sequences: the number of sequences that the step decodes. The result is None if no step of so many sequences was
        measured without drafts, so the next step must be one.
        """
        if sequences not in self._plain:
            return None
        if not self._of_drafts:
            return _FIRST_COST
        cost = sequences * median(self._of_drafts) / median(self._plain[sequences])
        return min(max(_MARGIN * cost, _LEAST_COST), 1.0)


class Acceptance:
    """Estimates the probability that a draft token of one kind is accepted if all drafts before it are.

    Where no draft pays, one token is tried after a pause, which doubles with each trial until drafts pay again.
    """

    def __init__(self) -> None:
        self._accepted = self._rejected = 0.0
        self._misses = 0  # drafts without an accepted token, one after the other
        self._pause = _FIRST_PAUSE
        self._left = 0
        self._is_trial = False

    @property
    def probability(self) -> float:
        return (self._accepted + 0.5) / (self._accepted + self._rejected + 1)

    def length(self, cost: float, most: int) -> int:
        """Return how many draft tokens to verify, so that each gains more than it costs.

        cost: from ``StepTimes.draft_cost``. most: the greatest result.
        """
        probability = self.probability
        length = most if cost < probability**most else int(math.log(cost) / math.log(probability))
        self._is_trial = False
        if length > 0:
            self._pause, self._left = _FIRST_PAUSE, 0
            return length
        if self._left > 0:
            self._left -= 1
            return 0
        self._is_trial = True
        self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return 1

    def note(self, drafted: int, accepted: int) -> None:
        """Record a verified draft. Of its rejected tokens only the first was judged."""
        self._misses = 0 if accepted else self._misses + 1
        is_improbable = (1 - self.probability) ** self._misses < _IMPROBABLE
        self._accepted *= _KEPT_WHEN_IMPROBABLE if is_improbable else _KEPT_DRAFT
        self._rejected *= _KEPT_DRAFT
        if accepted and self._is_trial:
            self._rejected = 0.0  # the text may have begun to repeat itself
        self._accepted += accepted
        self._rejected += accepted < drafted


class Drafts:
    """The drafts of one sequence. Longer matches are right more often, so each size of a match has its Acceptance."""

    def __init__(self) -> None:
        self._of_size: dict[int, Acceptance] = {}
        self._latest = Acceptance()

    def length(self, match: Match, cost: float, most: int) -> int:
        """Return how many tokens behind a match to verify, 0 to ``most``."""
        self._latest = self._of_size.setdefault(match.size, Acceptance())
        return self._latest.length(cost, most)

    def note(self, drafted: int, accepted: int) -> None:
        """Record how many tokens of the latest draft were accepted."""
        self._latest.note(drafted, accepted)
