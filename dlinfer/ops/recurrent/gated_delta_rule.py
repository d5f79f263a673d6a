"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.recurrent.sequence_states import check_states, ring, sequences

_ROUNDING = "computed in float32; the result is rounded once, and so is a state in 16 bits"
TOLERANCES = {
    torch.float32: Tolerance(
        5e-5, 2e-5, "float32; a kernel may take many tokens at once by solving a triangular system"
    ),
    torch.float16: Tolerance(2e-3, 2e-3, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, _ROUNDING),
}

NORM_EPSILON = 1e-6
"""The number added to the squared length of a query or key when it is normalised, as in flash-linear-attention."""


@fused_op(tolerances=TOLERANCES, version=2, mutates=("recurrent_state", "out"))
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    state_ids: Tensor,
    q_ends: Tensor,
    fresh: Tensor,
    past_lengths: Tensor | None,
    scale: float,
    normalise: bool,
    out: Tensor,
) -> None:
    """The torch op behind ``dlinfer.ops.gated_delta_rule``, which documents the arguments.

    out: [tokens, value heads, value size], gets the result; it shares no memory with another argument.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k = (prepared(x, value.shape[1], dtype, normalise) for x in (query, key))
    q, v, b, kept = q * scale, value.to(dtype), beta.to(dtype), decay.to(dtype).exp()
    states = ring(recurrent_state, past_lengths)
    slots, kept_states = states.shape[:2]
    for sequence in sequences(
        gated_delta_rule.rules, slots, state_ids, q_ends, fresh, past_lengths, value.shape[0]
    ):
        at = sequence.past % kept_states
        known = None if sequence.fresh or sequence.slot is None else states[sequence.slot, at].to(dtype)
        state = v.new_zeros(states.shape[2:]) if known is None else known
        for token in range(sequence.start, sequence.end):
            state = state * kept[token, :, None, None]
            error = v[token] - torch.einsum("hvk,hk->hv", state, k[token])
            state = state + torch.einsum("hv,hk->hvk", b[token, :, None] * error, k[token])
            out[token] = torch.einsum("hvk,hk->hv", state, q[token])
            if sequence.slot is not None and token >= sequence.end - kept_states:
                taken = token + 1 - sequence.start
                states[sequence.slot, (sequence.past + taken) % kept_states] = state


@gated_delta_rule.python_call
def _call_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    state_ids: Tensor,
    q_ends: Tensor,
    fresh: Tensor,
    scale: float | None = None,
    normalise: bool = True,
    past_lengths: Tensor | None = None,
) -> Tensor:
    """Compute, for each token and head, S <- exp(decay) S, S <- S + beta (v - S k) k^T, and the result scale * S q.

    S is the state of the token's sequence, [value size, key size] for each value head. It starts as the state in the
    sequence's slot, or as zeros if the sequence is fresh. After the sequence's last token, S is stored in the slot.

    query, key: [tokens, key heads, key size], with the sequences packed one after another.
    value: [tokens, value heads, value size]. The number of value heads is a multiple of the number of key heads: value
        head j reads key head j // (value heads / key heads). query, key and value have one dtype, float32, float16 or
        bfloat16, and any strides.
    decay: [tokens, value heads], floating, at most 0: the logarithm of the state's factor.
    beta: [tokens, value heads], floating, of 0..1: the share of the error v - S k that is corrected.
    recurrent_state: [slots, value heads, value size, key size], floating, float32 for exactness; any strides. With
        ``past_lengths`` it is [slots, kept, value heads, value size, key size]: the states after each of the sequence's
        last ``kept`` tokens.
    state_ids: [sequences], int32 or int64: the slot of each sequence, no slot twice. A negative id means no slot: the
        state starts at zero and is not stored.
    q_ends: [sequences], int32 or int64, on any device: the index after each sequence's last token.
    fresh: [sequences], bool: the sequence begins here, so the old contents of its slot are not read.
    scale: the factor of the result; None means 1 / sqrt(key size).
    normalise: divide each query and key by its length, sqrt(|x|^2 + 1e-6).
    past_lengths: [sequences], int32 or int64, how many tokens each sequence has before these. Given, S starts as the
        state at ``past_lengths % kept`` of the slot, and the state after n tokens of the sequence is stored at
        n % kept, for the last ``kept`` of its tokens. So the next call may begin after any of these. None: a slot has
        one state.

    Returns a new tensor of value's shape and dtype; recurrent_state is mutated. Computed in float32 at least. Raises
    OpArgumentError, also for ends that decrease or do not end at the number of tokens, and for slots out of range.
    """
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    factor = float(query.shape[-1]) ** -0.5 if scale is None else scale
    sequence = (state_ids, q_ends, fresh, past_lengths)
    gated_delta_rule.overload(
        query, key, value, decay, beta, recurrent_state, *sequence, factor, normalise, out
    )
    return out


def prepared(x: Tensor, value_heads: int, dtype: torch.dtype, normalise: bool) -> Tensor:
    """Return queries or keys repeated for each value head, in ``dtype``.

    x: [tokens, key heads, key size]; the result: [tokens, value heads, key size]. normalise: scale to L2 norm 1.
    """
    wide = x.to(dtype)
    if normalise:
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPSILON)
    groups = value_heads // x.shape[1]
    return wide if groups == 1 else wide.repeat_interleave(groups, dim=1)


gated_delta_rule.takes(
    query="float [tokens, key_heads, key_size]",
    key="like query [tokens, key_heads, key_size]",
    value="like query [tokens, value_heads, value_size]",
    decay="float on query [tokens, value_heads]",
    beta="float on query [tokens, value_heads]",
    recurrent_state="float on query [..., value_heads, value_size, key_size]",
    state_ids="int on query [sequences]",
    q_ends="int [sequences]",
    fresh="bool on query [sequences]",
    past_lengths="int on query [sequences]",
    out="like query [tokens, value_heads, value_size]",
)


@gated_delta_rule.check
def _check_gated_delta_rule(
    rules: Rules, query: Tensor, value: Tensor, recurrent_state: Tensor, past_lengths: Tensor | None
) -> None:
    check_states(rules, "recurrent_state", recurrent_state, 4, past_lengths)
    key_heads, heads = query.shape[1], value.shape[1]
    rules.require(
        key_heads > 0 and heads % key_heads == 0,
        "value",
        lambda: f"a multiple of {key_heads} heads",
        lambda: tuple(value.shape),
    )


@gated_delta_rule.samples
def _gated_delta_rule_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        lengths: list[int],
        ids: list[int],
        fresh: list[bool],
        key_heads: int = 2,
        value_heads: int = 4,
        key_size: int = 8,
        value_size: int = 12,
        normalise: bool = True,
        dtype: torch.dtype = torch.int64,
        past: list[int] | None = None,
        kept: int = 4,
    ) -> tuple[Any, ...]:
        tokens, states = sum(lengths), () if past is None else (kept,)
        value = make.tensor(tokens, value_heads, value_size)
        # without normalising, keys as long as 2 would let the state grow without bound
        key_scale = 1.0 if normalise else 0.5 * key_size**-0.5
        return (
            make.tensor(tokens, key_heads, key_size),
            make.tensor(tokens, key_heads, key_size, scale=key_scale),
            value,
            -make.tensor(tokens, value_heads).abs().float() / 2,
            make.tensor(tokens, value_heads).sigmoid(),
            make.tensor(6, *states, value_heads, value_size, key_size, scale=0.5).float(),
            torch.tensor(ids, dtype=dtype, device=make.device),
            torch.tensor(lengths, dtype=dtype).cumsum(0, dtype=dtype),
            torch.tensor(fresh, dtype=torch.bool, device=make.device),
            None if past is None else torch.tensor(past, dtype=dtype, device=make.device),
            float(key_size) ** -0.5,
            normalise,
            torch.zeros_like(value),
        )

    yield Sample("decoding", case([1, 1, 1], [2, 0, 5], [False, False, False]))
    yield Sample("one fresh sequence", case([7], [3], [True]))
    yield Sample(
        "mixed lengths, int32",
        case([70, 1, 5, 64], [4, 1, 0, 2], [True, False, True, False], dtype=torch.int32),
    )
    yield Sample("more than a chunk, continued", case([130], [1], [False], 1, 1, 16, 4))
    yield Sample("not normalised", case([9, 3], [1, 0], [False, True], 3, 3, 8, 8, False))
    yield Sample("no slot", case([2, 3, 1], [-1, 2, -1], [False, False, True]))
    yield Sample("decoding without a slot", case([1, 1], [-1, 2], [False, True]))
    yield Sample("a sequence without tokens", case([2, 0, 3], [1, 2, 3], [False, True, False]))
    yield Sample("no tokens", case([], [], []))
    several = case(
        [4, 70, 1, 0, 2], [3, 1, -1, 2, 0], [False, True, False, False, False], past=[6, 0, 3, 2, 5]
    )
    yield Sample("several states in a slot", several)
    yield Sample("decoding, several states", case([1, 1], [1, 0], [False, False], past=[7, 4], kept=2))
    args = case([4, 6], [0, 1], [True, False])
    slots = make.tensor(6, 3, 4, 12, 8).float()[:, 1]
    yield Sample("slots with gaps", (*args[:5], slots, *args[6:]))
    packed = make.tensor(10, 2 * 16 + 48)
    views = (torch.unflatten(x, 1, (2, 8)) for x in (packed[:, :16], packed[:, 16:32]))
    out = torch.zeros_like(args[-1])
    yield Sample(
        "views of one tensor", (*views, torch.unflatten(packed[:, 32:], 1, (4, 12)), *args[3:-1], out)
    )
