"""Runs of a mask: where there are some they say exactly what the mask says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.framework.transformers_ext.mask_runs import Run, runs_of


def rebuilt(runs: list[list[Run]], queries: int, keys: int) -> Tensor:
    """The mask that runs describe."""
    mask = torch.zeros(len(runs), 1, queries, keys, dtype=torch.bool)
    for index, sequence in enumerate(runs):
        for run in sequence:
            for row in range(run.first, run.last):
                end = run.end - (run.last - 1 - row) if run.causal else run.end
                begin = run.begin if run.window is None else max(run.begin, end - run.window)
                mask[index, 0, row, begin:end] = True
    return mask


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """Causal or not, with a window or none, padded on the left or right, over a cache with free slots, or any bools."""
    batch, queries = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    history, free = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    keys = history + queries + free
    if draw(st.booleans()) and draw(st.booleans()):
        flat = draw(st.lists(st.booleans(), min_size=batch * queries * keys, max_size=batch * queries * keys))
        return torch.tensor(flat).view(batch, 1, queries, keys)
    position = torch.arange(keys)
    row = torch.arange(queries)[:, None] + history
    mask = position <= row if draw(st.booleans()) else (position < history + queries).expand(queries, keys)
    window = draw(st.none() | st.integers(1, 6))
    if window is not None:
        mask = mask & (position > row - window)
    whole = mask.expand(batch, 1, queries, keys).clone()
    for index in range(batch):
        padding = draw(st.integers(0, queries))
        if draw(st.booleans()):
            whole[index, ..., :padding] = False
        else:
            whole[index, ..., keys - padding :] = False
    if draw(st.booleans()) and queries > 2:  # two packed sequences
        whole[..., 2:, : history + 2] = False
    return whole


@settings(max_examples=500)
@given(masks())
def test_runs_say_what_the_mask_says(mask: Tensor) -> None:
    runs = runs_of(mask)
    if runs is not None:
        assert torch.equal(rebuilt(runs, *mask.shape[2:]), mask)


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        (causal(4, 4), [Run(0, 4, 0, 4, True, None)]),
        (causal(3, 7), [Run(0, 3, 0, 7, True, None)]),
        (causal(1, 7), [Run(0, 1, 0, 7, False, None)]),
        (causal(4, 4) & (torch.arange(4) > 0), [Run(1, 4, 1, 4, True, None)]),
        (causal(5, 5).triu(-1), [Run(0, 5, 0, 5, True, 2)]),
        (torch.ones(1, 1, 3, 4, dtype=torch.bool), [Run(0, 3, 0, 4, False, None)]),
        (torch.zeros(1, 1, 3, 4, dtype=torch.bool), []),
        (causal(4, 4) & (torch.arange(4) < 2), [Run(0, 2, 0, 2, True, None), Run(2, 4, 0, 2, False, None)]),
    ],
)
def test_usual_masks_have_one_run_or_two(mask: Tensor, runs: list[Run]) -> None:
    assert runs_of(mask) == [runs]


def test_heads_that_agree_and_heads_that_differ() -> None:
    mask = causal(3, 3).expand(1, 4, 3, 3)
    assert runs_of(mask) == [[Run(0, 3, 0, 3, True, None)]]
    assert runs_of(mask.clone()) == [[Run(0, 3, 0, 3, True, None)]]
    other = mask.clone()
    other[0, 2, 2, 0] = False
    assert runs_of(other) is None


def test_what_has_no_runs() -> None:
    assert runs_of(torch.zeros(1, 1, 2, 2)) is None
    assert runs_of(torch.ones(2, 2, dtype=torch.bool)) is None
    assert runs_of(torch.tensor([[[[True, False, True]]]])) is None
    assert runs_of(torch.eye(9, dtype=torch.bool).flip(0)[None, None]) is None
    assert runs_of(torch.ones(1, 1, 0, 4, dtype=torch.bool)) is None
