"""Texts that repeat themselves end by their stop word, beside texts that have none."""

from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from torch import Tensor


@pytest.fixture
def filtered() -> Any:
    PytorchEngineConfig(device_type="cpu")
    from lmdeploy.pytorch.engine import logits_process

    return logits_process._filter_repetition_ngram_


ROWS = ([3, 4, 3, 4, 3, 4], [3, 4, 3, 4, 3, 4], [1, 2, 3, 4, 5, 6])
"""The first two repeat a pair."""


def call(function: Any, scores: Tensor, stop_words: Tensor | None, size: int = 2) -> Tensor:
    sizes, thresholds = torch.full((3,), size), torch.full((3,), 2)
    return function(scores, stop_words, torch.tensor(ROWS), sizes, thresholds, 2, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_a_stop_word_stays_as_it_is(filtered, dtype):
    scores = torch.randn(3, 9).to(dtype)
    got = call(filtered, scores.clone(), torch.tensor([[7, 8], [-1, -1], [7, -1]]))
    assert got[0].isinf().tolist() == [True] * 7 + [False, True]
    assert got[0, 7] == 0
    assert torch.equal(got[1:], scores[1:])


def test_all_have_one(filtered):
    scores, words = torch.randn(3, 9), torch.tensor([[7], [2], [0]])
    assert torch.equal(
        call(filtered, scores.clone(), words), call(filtered.__wrapped__, scores.clone(), words)
    )


def test_none_has_one(filtered):
    scores = torch.randn(3, 9)
    for words in (None, torch.empty(3, 0, dtype=torch.int64), torch.full((3, 2), -1)):
        assert torch.equal(call(filtered, scores.clone(), words), scores)


def test_lmdeploys_own_reads_behind_the_logits(filtered):
    """When this fails LMDeploy has mended it, and the patch may go."""
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        call(filtered.__wrapped__, torch.randn(3, 9), torch.tensor([[7], [-1], [7]]))
