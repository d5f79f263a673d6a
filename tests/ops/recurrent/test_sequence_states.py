"""Ops with a state for each sequence, against numpy in float64 by the textbook, however a text is cut into calls."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops, vendor

MANY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,  # the same examples in every run: a failure repeats
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SLOTS = 7
TOLERANCE = {
    "rtol": 1e-4,
    "atol": 2e-5,
}  # float32 sums over up to 150 tokens, as products of chunks or one by one


@dataclass(frozen=True)
class Texts:
    """Texts that are computed in calls: ``calls[i][b]`` is how many tokens of text b call i has."""

    calls: list[list[int]]
    slots: list[int]
    index_dtype: torch.dtype
    strided: bool
    seed: int


@st.composite
def texts(draw: st.DrawFn) -> Texts:
    count = draw(st.integers(1, 4))
    lengths = st.one_of(st.integers(0, 5), st.sampled_from([1, 63, 64, 65, 130]))
    same = st.lists(lengths, min_size=count, max_size=count)
    decoding = st.just([1] * count)
    return Texts(
        calls=draw(st.lists(st.one_of(same, decoding), min_size=1, max_size=3)),
        slots=draw(st.permutations(range(SLOTS)))[:count],
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class Calls:
    """The tokens of each call, packed, and which of its sequences begin in it. Unwritten slots hold NaN."""

    def __init__(self, given: Texts) -> None:
        self.given = given
        self.generator = torch.Generator().manual_seed(given.seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        wide = (*shape[:-1], 2 * shape[-1]) if self.given.strided else shape
        return torch.randn(wide, generator=self.generator)[..., : shape[-1]] * scale

    def cache(self, *shape: int) -> Tensor:
        if self.given.strided:  # as LMDeploy's: all layers of a slot side by side
            return torch.full((SLOTS, 2, *shape), torch.nan)[:, 1]
        return torch.full((SLOTS, *shape), torch.nan)

    def sequences(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """state_ids, q_ends and fresh of a call."""
        lengths, earlier = self.given.calls[number], self.given.calls[:number]
        known = [sum(call[b] for call in earlier) for b in range(len(lengths))]
        dtype = self.given.index_dtype
        return (
            torch.tensor(self.given.slots, dtype=dtype),
            torch.tensor(lengths).cumsum(0).to(dtype),
            torch.tensor([count == 0 for count in known]),
        )


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Within what float32 sums over 150 tokens give, as products of chunks or one by one."""
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def of_texts(parts: list[Tensor], calls: list[list[int]]) -> list[np.ndarray]:
    """Packed tokens of each call -> the tokens of each text, in float64."""
    pieces = [part.split(lengths) for part, lengths in zip(parts, calls, strict=True)]
    return [torch.cat(own).double().numpy() for own in zip(*pieces, strict=True)]


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
@given(given=texts(), width=st.integers(1, 5), bias=st.booleans(), silu=st.booleans())
@MANY
def test_causal_conv1d(vendor_name: str, given: Texts, width: int, bias: bool, silu: bool) -> None:
    vendor.use(vendor_name)
    calls = Calls(given)
    channels = 6
    weight, offset = calls.normal(channels, width), calls.normal(channels) if bias else None
    state = calls.cache(channels, width)
    xs = [calls.normal(sum(lengths), channels) for lengths in given.calls]
    outs = [ops.causal_conv1d(x, weight, offset, state, *calls.sequences(i), silu) for i, x in enumerate(xs)]
    for slot, x, got in zip(given.slots, of_texts(xs, given.calls), of_texts(outs, given.calls), strict=True):
        padded = np.concatenate([np.zeros((width, channels)), x])
        want = np.zeros_like(x) + (0 if offset is None else offset.numpy())
        for channel in range(channels if len(x) else 0):
            taps = weight[channel].double().numpy()[::-1]
            want[:, channel] += np.convolve(padded[1:, channel], taps, mode="valid")
        close(got, want / (1 + np.exp(-want)) if silu else want)
        if len(x):
            np.testing.assert_array_equal(state[slot].numpy(), padded[-width:].T.astype(np.float32))
    untouched = sorted(set(range(SLOTS)) - {s for s, n in zip(given.slots, _total(given), strict=True) if n})
    assert bool(state[untouched].isnan().all())


def _total(given: Texts) -> list[int]:
    return [sum(lengths) for lengths in zip(*given.calls, strict=True)]


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
@given(given=texts(), heads=st.sampled_from([(1, 1), (2, 2), (2, 6)]), normalise=st.booleans())
@MANY
def test_gated_delta_rule(vendor_name: str, given: Texts, heads: tuple[int, int], normalise: bool) -> None:
    """S <- exp(g) S (I - beta k k^T) + beta v k^T, as one matrix product a token."""
    vendor.use(vendor_name)
    calls = Calls(given)
    (key_heads, value_heads), size, value_size = heads, 8, 5
    state = calls.cache(value_heads, value_size, size)
    inputs, outs = [], []
    for i, lengths in enumerate(given.calls):
        tokens = sum(lengths)
        # Keys that are not normalised must be short, or the state grows without bound.
        scale = 1.0 if normalise else 0.3
        q, k = (calls.normal(tokens, key_heads, size, scale=scale) for _ in range(2))
        v = calls.normal(tokens, value_heads, value_size)
        decay = -3 * calls.normal(tokens, value_heads).abs()
        rate = calls.normal(tokens, value_heads).sigmoid()
        outs.append(
            ops.gated_delta_rule(q, k, v, decay, rate, state, *calls.sequences(i), normalise=normalise)
        )
        inputs.append((q, k, v, decay, rate))
    by_text = [of_texts(list(parts), given.calls) for parts in zip(*inputs, strict=True)]
    for slot, got, q, k, v, g, rate in zip(given.slots, of_texts(outs, given.calls), *by_text, strict=True):
        want, last = _delta_rule(q, k, v, g, rate, normalise)
        close(got, want)
        if len(q):
            close(state[slot].numpy(), last)
        else:
            assert bool(state[slot].isnan().all())


def _delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, rate: np.ndarray, normalise: bool
) -> tuple[np.ndarray, np.ndarray]:
    tokens, heads, value_size = v.shape
    size, group = q.shape[2], heads // q.shape[1]
    out, states = np.zeros_like(v), np.zeros((heads, value_size, size))
    for t in range(tokens):
        for h in range(heads):
            query, key = q[t, h // group], k[t, h // group]
            if normalise:
                query, key = (x / np.sqrt(x @ x + 1e-6) for x in (query, key))
            change = np.eye(size) - rate[t, h] * np.outer(key, key)
            states[h] = np.exp(g[t, h]) * states[h] @ change + rate[t, h] * np.outer(v[t, h], key)
            out[t, h] = states[h] @ query / np.sqrt(size)
    return out, states


@dataclass(frozen=True)
class Drafted:
    """Texts that grow in steps. A step has ``steps[i][b]`` = (tokens of text b, how many of them stay)."""

    kept: int
    steps: list[list[tuple[int, int]]]
    slots: list[int]
    index_dtype: torch.dtype
    seed: int


@st.composite
def drafted(draw: st.DrawFn) -> Drafted:
    count, kept = draw(st.integers(1, 3)), draw(st.integers(1, 4))

    def step() -> list[tuple[int, int]]:
        kind = draw(st.sampled_from(["prompts", "drafts", "decoding"]))
        lengths = {
            "prompts": st.sampled_from([1, 2, 5, 64, 67]),
            "drafts": st.just(kept),
            "decoding": st.just(1),
        }
        taken = [draw(lengths[kind]) for _ in range(count)]
        return [(n, draw(st.integers(max(1, n - kept + 1), n))) for n in taken]

    return Drafted(
        kept,
        [step() for _ in range(draw(st.integers(1, 4)))],
        draw(st.permutations([-1, *range(SLOTS)]))[:count],
        draw(st.sampled_from([torch.int32, torch.int64])),
        draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
@given(given=drafted())
@MANY
def test_tokens_can_be_taken_back(vendor_name: str, given: Drafted) -> None:
    """A step begins after the tokens that stayed, as if the others had never been there."""
    vendor.use(vendor_name)
    generator = torch.Generator().manual_seed(given.seed)
    channels, width, heads, size = 8, 3, 2, 4
    taps = torch.randn(channels, width, generator=generator)
    inputs = torch.full((SLOTS, 2, given.kept, channels, width), torch.nan)[:, 1]
    states = torch.full((SLOTS, 2, given.kept, heads, size, size), torch.nan)[:, 1]

    def conv(x: Tensor, state: Tensor, where: list[Tensor], past: Tensor | None = None) -> Tensor:
        return ops.causal_conv1d(x, taps, None, state, *where, past_lengths=past)

    def rule(x: Tensor, state: Tensor, where: list[Tensor], past: Tensor | None = None) -> Tensor:
        heads = x.view(-1, 2, 4)
        return ops.gated_delta_rule(
            heads,
            heads.roll(1, -1),
            heads,
            -x[:, :2].abs(),
            x[:, 2:4].sigmoid(),
            state,
            *where,
            past_lengths=past,
        ).flatten(1)

    texts = [torch.empty(0, channels) for _ in given.slots]
    for step in given.steps:
        new = [torch.randn(count, channels, generator=generator) for count, _ in step]
        ends = torch.tensor([count for count, _ in step]).cumsum(0)
        past = torch.tensor([len(text) for text in texts])
        indices = [torch.tensor(given.slots), ends, past]
        ids, ends, past = (numbers.to(given.index_dtype) for numbers in indices)
        for call, cache in ((conv, inputs), (rule, states)):
            ours = call(torch.cat(new), cache, [ids, ends, past == 0], past)
            for slot, text, own, got in zip(
                given.slots, texts, new, ours.split([len(x) for x in new]), strict=True
            ):
                whole = own if slot < 0 else torch.cat([text, own])  # without a slot nothing is remembered
                alone = [torch.tensor([0]), torch.tensor([len(whole)]), torch.tensor([True])]
                want = call(whole, torch.zeros(1, *cache.shape[2:]), alone)[-len(own) :]
                close(got.double().numpy(), want.double().numpy())
        texts = [torch.cat([text, own[:stay]]) for text, own, (_, stay) in zip(texts, new, step, strict=True)]
    untouched = sorted(set(range(SLOTS)) - set(given.slots))
    assert bool(inputs[untouched].isnan().all())
    assert bool(states[untouched].isnan().all())


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
def test_one_text_cannot_reach_another(vendor_name: str) -> None:
    """NaN in one text, and in the slot of a text that begins, stay where they are."""
    vendor.use(vendor_name)
    x, state = torch.randn(9, 4), torch.full((3, 4, 3), torch.nan)
    x[:4] = torch.nan
    sequences = (torch.tensor([2, 0]), torch.tensor([4, 9]), torch.tensor([True, True]))
    out = ops.causal_conv1d(x, torch.randn(4, 3), None, state, *sequences)
    assert not bool(out[4:].isnan().any())
    assert not bool(state[0].isnan().any())
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    q[:4] = k[:4] = v[:4] = torch.nan
    rule = torch.full((3, 2, 4, 4), torch.nan)
    gate = torch.rand(9, 2)
    out = ops.gated_delta_rule(q, k, v, -gate, gate, rule, *sequences)
    assert not bool(out[4:].isnan().any())
    assert not bool(rule[0].isnan().any())
    assert bool(rule[2].isnan().all())


def test_strong_decay_of_a_long_text_stays_finite() -> None:
    tokens = 200
    q, k, v = (torch.randn(tokens, 1, 8) for _ in range(3))
    decay = torch.full((tokens, 1), -50.0)
    state = torch.zeros(1, 1, 8, 8)
    sequence = (torch.tensor([0]), torch.tensor([tokens]), torch.tensor([True]))
    out = ops.gated_delta_rule(q, k, v, decay, torch.ones(tokens, 1), state, *sequence)
    q, k, v, g = (x.double().numpy() for x in (q, k, v, decay))
    want, _ = _delta_rule(q, k, v, g, np.ones((tokens, 1)), True)
    close(out.numpy(), want)
