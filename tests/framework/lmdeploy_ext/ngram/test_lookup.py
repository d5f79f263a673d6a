"""The lookup finds the latest of the longest earlier occurrences, as a search of all of them does."""

import timeit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlinfer.framework.lmdeploy_ext.ngram import lookup
from dlinfer.framework.lmdeploy_ext.ngram.lookup import Match


def searched(tokens: list[int], smallest: int, largest: int) -> Match | None:
    """The oracle: try each size from the largest, and each place from the last."""
    for size in range(min(largest, len(tokens) - 1), smallest - 1, -1):
        last = tokens[len(tokens) - size :]
        for distance in range(1, len(tokens) - size + 1):
            start = len(tokens) - size - distance
            if tokens[start : start + size] == last:
                return Match(size, distance)
    return None


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), SIZES)
def test_as_a_search_of_all_places(tokens: list[int], sizes: tuple[int, int]):
    assert lookup.find(np.array(tokens), *sizes) == searched(tokens, *sizes)


@given(st.integers(0, 2**32), st.integers(2, 30), st.integers(500, 1500), SIZES)
def test_in_texts_whose_end_is_searched_first(seed: int, words: int, length: int, sizes: tuple[int, int]):
    tokens = np.random.default_rng(seed).integers(0, words, length)
    assert lookup.find(tokens, *sizes) == searched(tokens.tolist(), *sizes)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 30))
def test_the_text_goes_on_as_it_did_before(tokens: list[int], distance: int, count: int):
    distance = min(distance, len(tokens))
    text = list(tokens)
    for _ in range(count):
        text.append(text[-distance])
    assert lookup.continuation(np.array(tokens), distance, count).tolist() == text[len(tokens) :]


@pytest.mark.parametrize("period", [1, 64, 4096, 100_000])
def test_a_step_has_time_for_many_lookups(period: int):
    """The fastest of many calls; 50 us is what a sequence may cost at 8k tokens."""
    words = np.random.default_rng(0).integers(0, 150_000, period)
    tokens = np.resize(words, 8192)
    seconds = min(timeit.repeat(lambda: lookup.find(tokens, 2, 5), number=20, repeat=20)) / 20
    assert seconds < 50e-6
