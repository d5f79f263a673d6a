"""Seeded sampling: the number generator against its published vectors, the draw against the distribution."""

import torch

from dlinfer.framework.lmdeploy_ext.sampling.multinomial import (
    SeededMultinomialSampling,
    philox_uniform,
)


def as_unit(word: int) -> float:
    signed = word - (1 << 32) if word >= 1 << 31 else word
    return float(torch.tensor(~signed if signed < 0 else signed, dtype=torch.float32) * 4.6566127342e-10)


def test_philox_gives_the_published_numbers():
    # Random123's kat_vectors, philox4x32 with 10 rounds: counter 0 and key 0, then all bits set in the parts
    # that are used here (counter word 0 and both key words; the other counter words stay 0 in triton's rand).
    assert philox_uniform(torch.tensor([0]), torch.tensor([0])).item() == as_unit(0x6627E8D5)


def test_numbers_depend_on_seed_and_counter_only():
    seeds, counters = torch.tensor([1, 1, 2, (1 << 40) + 1]), torch.tensor([0, 1, 0, 0])
    numbers = philox_uniform(seeds, counters)
    assert len(set(numbers.tolist())) == 4
    assert torch.equal(numbers, philox_uniform(seeds, counters))
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_many_numbers_at_once_are_those_of_each_alone():
    seeds = torch.tensor([0, 1, -1, 1 << 40, -(1 << 63), (1 << 63) - 1, 7, 8, 9, 10])
    for counters in (torch.arange(10), torch.arange(10, dtype=torch.int32) - 5, torch.arange(10) + (1 << 33)):
        alone = [philox_uniform(seeds[i : i + 1], counters[i : i + 1]) for i in range(10)]
        assert torch.equal(philox_uniform(seeds, counters), torch.cat(alone))
    assert philox_uniform(seeds[:0], seeds[:0]).shape == (0,)


def test_draws_follow_the_distribution_and_skip_impossible_tokens():
    count = 20_000
    scores = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).expand(count, 4)
    indices = torch.tensor([[7, 3, 9, 1]]).expand(count, 4)
    seeds, offsets = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    drawn = SeededMultinomialSampling().forward(scores, seeds, offsets, indices)
    frequency = torch.bincount(drawn, minlength=10) / count
    # Three standard deviations of a binomial share: 3 * sqrt(0.25 / 20000) = 0.011.
    torch.testing.assert_close(frequency[[7, 3, 9]], scores[0, :3], atol=0.011, rtol=0)
    assert frequency[1] == 0


def test_a_sum_below_the_drawn_number_gives_the_first_token_like_cuda():
    drawn = SeededMultinomialSampling().forward(
        torch.zeros(1, 3), torch.tensor([5]), torch.tensor([1]), torch.tensor([[4, 5, 6]])
    )
    assert drawn.tolist() == [4]


def test_without_indices_the_place_is_the_token():
    drawn = SeededMultinomialSampling().forward(
        torch.tensor([[0.0, 1.0]]), torch.tensor([5]), torch.tensor([1])
    )
    assert drawn.tolist() == [1]
