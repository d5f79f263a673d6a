"""Penalties and stop words change the logits that they name, as LMDeploy's own functions do, and no others."""

from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def functions():
    """(ours, LMDeploy's own)."""
    PytorchEngineConfig(device_type="cpu")
    from lmdeploy.pytorch.engine import logits_process

    ours: Any = logits_process._process_bad_words_, logits_process._process_repetition_penalty_
    return ours, [one.__wrapped__ for one in ours]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_words(functions, dtype):
    (ours, _), (own, _) = functions
    scores = torch.randn(3, 500).to(dtype)
    words = torch.tensor([[7, 499, -1], [1, 2, 3], [-1, 8, -1]])
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, False]])
    got = scores.clone()
    assert ours(got, words, mask) is got
    assert torch.equal(got, own(scores.clone(), words, mask))
    assert got.isinf().nonzero().tolist() == [[0, 7], [0, 499], [2, 8]]
    assert torch.equal(ours(scores.clone(), words, mask, 3.0), own(scores.clone(), words, mask, 3.0))


def test_the_first_word_is_bad_beside_places_without_one(functions):
    """LMDeploy puts the first logit back in such places, which may undo what another place has put there."""
    (ours, _), _ = functions
    scores = torch.zeros(1, 9).bfloat16()
    ours(scores, torch.tensor([[0, -1]]), torch.tensor([[True, False]]))
    assert scores.isinf().nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_repetition_penalty(functions, dtype):
    (_, ours), (_, own) = functions
    scores = torch.randn(2, 500).to(dtype)
    ids = torch.tensor([[7, 499, 7, 0], [1, 2, 3, 3]])
    penalty = torch.tensor([1.3, 0.7])
    got = scores.clone()
    assert ours(got, ids, penalty) is got
    assert torch.equal(got, own(scores.clone(), ids, penalty))
    assert (got != scores).sum() == 3 + 3


def test_no_words_at_all(functions):
    (bad_words, penalty), _ = functions
    scores = torch.randn(2, 50).bfloat16()
    none = torch.zeros(2, 0, dtype=torch.long)
    assert torch.equal(bad_words(scores.clone(), none, none.bool()), scores)
    assert torch.equal(penalty(scores.clone(), none, torch.ones(2)), scores)
