"""Stop words change the logits that they name, as LMDeploy's own function does, and no others."""

from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def bad_words():
    """(ours, LMDeploy's own)."""
    PytorchEngineConfig(device_type="cpu")
    from lmdeploy.pytorch.engine import logits_process

    ours: Any = logits_process._process_bad_words_
    return ours, ours.__wrapped__


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_words(bad_words, dtype):
    ours, own = bad_words
    scores = torch.randn(3, 500).to(dtype)
    words = torch.tensor([[7, 499, -1], [1, 2, 3], [-1, 8, -1]])
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, False]])
    got = scores.clone()
    assert ours(got, words, mask) is got
    assert torch.equal(got, own(scores.clone(), words, mask))
    assert got.isinf().nonzero().tolist() == [[0, 7], [0, 499], [2, 8]]
    assert torch.equal(ours(scores.clone(), words, mask, 3.0), own(scores.clone(), words, mask, 3.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_word_is_bad_beside_places_without_one(bad_words, dtype):
    """LMDeploy puts the first logit back in such places, which may undo what another place has put there."""
    ours, _ = bad_words
    scores = torch.zeros(1, 9).to(dtype)
    ours(scores, torch.tensor([[0, -1]]), torch.tensor([[True, False]]))
    assert scores.isinf().nonzero().tolist() == [[0, 0]]


def test_no_words_at_all(bad_words):
    ours, _ = bad_words
    scores = torch.randn(2, 50).bfloat16()
    none = torch.zeros(2, 0, dtype=torch.long)
    assert torch.equal(ours(scores.clone(), none, none.bool()), scores)
