"""The sampler against transformers' own processors, and what draws depend on."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.mindie_ext.errors import SamplingError
from dlinfer.framework.mindie_ext.sampling import (
    Sampler,
    SamplingData,
    SamplingMetadata,
    SamplingParam,
)
from dlinfer.framework.mindie_ext.sampling.scores import candidates, penalised

NO_IDS: Any = torch.empty(0)


def metadata(count: int, first: int = 0, **arrays: Any) -> SamplingMetadata:
    ids = np.arange(first, first + count)
    given: dict[str, Any] = {name: np.asarray(one) for name, one in arrays.items()}
    return SamplingMetadata.from_numpy([ids[row : row + 1] for row in range(count)], **given)


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


# --- what parameters make of logits


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 40), st.floats(0.2, 5), st.integers(0, 1000))
def test_repetition_penalty_is_that_of_transformers(
    rows: int, vocabulary: int, penalty: float, seed: int
) -> None:
    logits = logits_of(rows, vocabulary, seed)
    ids = torch.randint(0, vocabulary, (rows, 7), generator=torch.Generator().manual_seed(seed))
    drawn = metadata(rows, repetition_penalty=[penalty] * rows)
    drawn.update_token_ids(ids.numpy(), None)
    whole: Any = ids
    expected = RepetitionPenaltyLogitsProcessor(float(np.float32(penalty)))(whole, logits.clone())
    torch.testing.assert_close(penalised(logits, drawn), expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(0, 70), st.floats(0.01, 1), st.integers(0, 1000))
def test_filters_leave_the_distribution_of_transformers(
    vocabulary: int, top_k: int, top_p: float, seed: int
) -> None:
    """Values are apart, so that no sum of float32 in another order decides; top_p is kept off the sums."""
    row = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)).float() * 0.37
    expected = row[None].double()
    if top_k:
        expected = TopKLogitsWarper(top_k)(NO_IDS, expected)
    sums = expected.softmax(-1).sort(descending=True).values.cumsum(-1)
    if (sums - top_p).abs().min() < 1e-4:
        return
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(NO_IDS, expected)
    left, ids = candidates(row, top_k, top_p)
    got = torch.full((vocabulary,), 0.0, dtype=torch.float64)
    got[ids] = left.double().softmax(0)
    torch.testing.assert_close(got, expected.softmax(-1)[0], rtol=1e-9, atol=1e-12)


def test_frequency_and_presence_count_the_answer_alone() -> None:
    logits = torch.zeros(2, 5)
    drawn = metadata(2, frequency_penalty=[0.5, 0.0], presence_penalty=[0.0, 2.0])
    drawn.update_token_ids(np.asarray([[0, 0, 0], [1, 1, 1]]), np.asarray([[2, 2, 5], [3, 3, -1]]))
    assert penalised(logits, drawn).tolist() == [[0, 0, -1, 0, 0], [0, 0, 0, -2, 0]]


def test_temperature_scales_what_is_drawn_from() -> None:
    """1000 draws at two temperatures follow the softmax that transformers' warper gives: chi-square at 0.999."""
    row = logits_of(1, 6)
    for temperature in (0.5, 2.0):
        expected = TemperatureLogitsWarper(temperature)(NO_IDS, row.clone()).softmax(-1)[0]
        sampler, count = Sampler(2), 1000
        drawn = metadata(
            count, do_sample=[True] * count, temperature=[temperature] * count, seeds=range(count)
        )
        tokens = sampler(row.expand(count, -1), drawn).token_ids
        seen = np.bincount(tokens, minlength=6)
        chi_square = ((seen - count * expected.numpy()) ** 2 / (count * expected.numpy())).sum()
        assert chi_square < 20.5  # of 5 degrees of freedom


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [(1, 1.0, 1), (0, 0.0, 1), (0, 1e-9, 1), (99, 1.0, 4), (2, 1.0, 2), (4, 0.5, 1)],
)
def test_edges_of_the_filters(top_k: int, top_p: float, left: int) -> None:
    row = torch.tensor([1.0, 5.0, 2.0, 3.0])
    ordered, ids = candidates(row, top_k, top_p)
    assert len(ids) == len(ordered) == left
    assert ids[0] == 1


def test_equals_of_the_last_are_kept_as_transformers_does() -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 0.0])
    assert sorted(candidates(row, 1, 1.0)[1].tolist()) == [1, 2]
    assert torch.isfinite(TopKLogitsWarper(1)(NO_IDS, row[None])).sum() == 2


# --- what is chosen


def test_greedy_is_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, -1.0, 0.0]])
    before = logits.clone()
    for given_metadata in (None, metadata(2), metadata(2, do_sample=[True, True], temperature=[0.0, 0.0])):
        assert Sampler(3)(logits, given_metadata).token_ids.tolist() == [1, 0]
    assert torch.equal(logits, before)


def test_greedy_and_drawn_sequences_in_one_batch() -> None:
    logits = logits_of(40, 50)
    drawn = metadata(
        40, do_sample=[row % 2 == 1 for row in range(40)], temperature=[5.0] * 40, seeds=range(40)
    )
    tokens = Sampler(4)(logits, drawn).token_ids
    greedy = logits.argmax(-1).numpy()
    assert (tokens[::2] == greedy[::2]).all()
    assert (tokens[1::2] != greedy[1::2]).any()


def draws(sampler: Sampler, sequences: list[int], steps: int, threads_seed: int = 7) -> dict[int, list[int]]:
    """Tokens of sequences over some steps; each sequence's logits and seed are its own."""
    tokens: dict[int, list[int]] = {one: [] for one in sequences}
    for step in range(steps):
        logits = torch.cat([logits_of(1, 64, 100 * one + step) for one in sequences])
        drawn = SamplingMetadata.from_numpy(
            [np.asarray([one]) for one in sequences],
            do_sample=np.ones(len(sequences), dtype=bool),
            top_k=np.asarray([20] * len(sequences)),
            top_p=np.asarray([0.95] * len(sequences)),
            seeds=np.asarray([threads_seed + one for one in sequences]),
        )
        for one, token in zip(sequences, sampler(logits, drawn).token_ids.tolist(), strict=True):
            tokens[one].append(token)
    return tokens


def test_a_draw_depends_on_its_sequence_alone() -> None:
    """Not on threads, on the batch, or on its order."""
    expected = draws(Sampler(1), [3], 6)[3]
    assert draws(Sampler(8), [3], 6)[3] == expected
    assert draws(Sampler(4), [9, 3, 1, 5], 6)[3] == expected
    assert draws(Sampler(4), [5, 9, 3], 6)[3] == expected
    assert len(set(expected)) > 1


def test_a_sequence_that_is_forgotten_begins_anew() -> None:
    sampler = Sampler(2)
    first = draws(sampler, [3, 4], 4)
    assert draws(sampler, [3, 4], 4) != first
    sampler.clear_cache(np.asarray([3, 4, 99]))
    assert draws(sampler, [3, 4], 4) == first


def test_without_a_seed_draws_differ() -> None:
    logits = torch.zeros(1, 1000)
    tokens = {int(Sampler(1)(logits, metadata(1, do_sample=[True])).token_ids[0]) for _ in range(20)}
    assert len(tokens) > 10


def test_two_samplers_at_once() -> None:
    expected = draws(Sampler(2), [1, 2, 3], 20)
    results: list[dict[int, list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(draws(Sampler(2), [1, 2, 3], 20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_log_probabilities() -> None:
    logits = logits_of(3, 30)
    drawn = metadata(3, top_logprobs=[0, 2, 4], num_top_tokens=[0, 2, 4])
    output = Sampler(1)(logits, drawn)
    every = logits.log_softmax(-1)
    assert output.top_token_ids.shape == output.top_logprobs.shape == (3, 4)
    np.testing.assert_allclose(output.logprobs, every.amax(-1), rtol=1e-6)
    np.testing.assert_allclose(output.top_logprobs, every.topk(4).values, rtol=1e-6)
    without = Sampler(1)(logits, metadata(3))
    assert (without.logprobs == -9999.0).all()
    assert without.top_token_ids.shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = logits_of(4, 33).to(dtype)
    drawn = metadata(4, do_sample=[True] * 4, seeds=[1, 2, 3, 4])
    assert (Sampler(2)(logits, drawn).token_ids == Sampler(2)(logits.float(), drawn).token_ids).all()


def test_one_token_to_choose_from() -> None:
    drawn = metadata(2, do_sample=[True, False], top_k=[5, 0], top_p=[0.1, 1.0])
    assert Sampler(2)(torch.zeros(2, 1), drawn).token_ids.tolist() == [0, 0]


def test_infinite_logits() -> None:
    drawn = metadata(1, do_sample=[True], seeds=[4])
    only = torch.full((1, 9), -torch.inf)
    only[0, 6] = -1e30
    assert Sampler(1)(only, drawn).token_ids.tolist() == [6]
    for wrong in (torch.full((1, 9), -torch.inf), torch.full((1, 9), torch.nan)):
        with pytest.raises(SamplingError, match="sequence 0"):
            Sampler(1)(wrong)
    some = torch.zeros(1, 9)
    some[0, 2] = torch.inf
    assert Sampler(1)(some).token_ids.tolist() == [2]
    with pytest.raises(SamplingError, match="inf"):
        Sampler(1)(some, drawn)


@pytest.mark.parametrize(
    "logits", [torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 4)]
)
def test_logits_of_another_shape(logits: torch.Tensor) -> None:
    with pytest.raises(SamplingError, match="logits"):
        Sampler(1)(logits, metadata(2))


# --- the metadata


BAD: list[tuple[dict[str, Any], str]] = [
    ({"repetition_penalty": [0.0, 1.0]}, "repetition_penalty"),
    ({"repetition_penalty": [1.0]}, "repetition_penalty"),
    ({"repetition_penalty": [np.nan, 1.0]}, "repetition_penalty"),
    ({"frequency_penalty": [np.inf, 0.0]}, "frequency_penalty"),
    ({"presence_penalty": [[0.0, 0.0]]}, "presence_penalty"),
    ({"temperature": [-0.1, 1.0]}, "temperature"),
    ({"temperature": ["a", "b"]}, "temperature"),
    ({"top_k": [-1, 0]}, "top_k"),
    ({"top_p": [1.1, 1.0]}, "top_p"),
    ({"top_p": [-0.1, 1.0]}, "top_p"),
    ({"top_logprobs": [21, 0]}, "top_logprobs"),
    ({"top_logprobs": [-1, 0]}, "top_logprobs"),
    ({"seeds": [-1, 0]}, "seeds"),
    ({"do_sample": [True]}, "do_sample"),
]


@pytest.mark.parametrize(("arrays", "name"), BAD)
def test_a_wrong_parameter_is_named(arrays: dict[str, Any], name: str) -> None:
    with pytest.raises(SamplingError) as raised:
        metadata(2, **arrays)
    assert raised.value.fields["parameter"] == name


def test_arguments_are_not_mutated() -> None:
    arrays = {
        "top_k": np.asarray([5, 7]),
        "temperature": np.asarray([0.0, 1.5]),
        "do_sample": np.ones(2, bool),
    }
    before = {name: one.copy() for name, one in arrays.items()}
    Sampler(1)(logits_of(2, 9), metadata(2, **arrays))
    assert all((arrays[name] == one).all() for name, one in before.items())


def test_several_sequences_of_a_request_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="use_beam_search"):
        metadata(2, use_beam_search=[True, False])
    with pytest.raises(UnsupportedFeatureError, match="best_of"):
        metadata(2, best_of=[2, 1])


def test_the_deprecated_pair() -> None:
    logits = logits_of(2, 20)
    data = SamplingData.from_numpy(
        np.asarray([[1, 2], [3, 4]]), np.asarray([[2], [4]]), request_ids=np.asarray([8, 9])
    )
    param = SamplingParam.from_numpy(
        repetition_penalty=np.asarray([1.2, 1.0]),
        do_sample=np.asarray([True, False]),
        seed=np.asarray([5, 6]),
    )
    made = SamplingMetadata.from_deprecated(data, param)
    same = metadata(2, 8, repetition_penalty=[1.2, 1.0], do_sample=[True, False], seeds=[5, 6])
    same.update_token_ids(np.asarray([[1, 2], [3, 4]]), None)
    tokens, logprobs = Sampler(1)(logits, made).to_deprecated()
    assert (tokens == Sampler(1)(logits, same).token_ids).all()
    assert (logprobs == -9999.0).all()
    with pytest.raises(SamplingError, match="equal length"):
        SamplingData.from_numpy(np.zeros((2, 1), int), np.zeros((3, 1), int))
