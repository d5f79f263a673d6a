"""A short causal convolution of each channel over time. Each sequence's last inputs are its state."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.recurrent.sequence_states import check_states, ring, sequences

_ROUNDING = "computed in float32 and rounded once; a kernel may round before the activation too"
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5, "float32 sums over the width of the kernel, in any order"),
    torch.float16: Tolerance(4e-3, 4e-3, _ROUNDING),
    torch.bfloat16: Tolerance(3.2e-2, 3.2e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES, version=2, mutates=("conv_state", "out"))
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_ids: Tensor,
    q_ends: Tensor,
    fresh: Tensor,
    past_lengths: Tensor | None,
    silu: bool,
    out: Tensor,
) -> None:
    """The torch op behind ``dlinfer.ops.causal_conv1d``, which documents the arguments.

    out: [tokens, channels], gets the result; it shares no memory with another argument.
    """
    width = weight.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    states = ring(conv_state, past_lengths)
    slots, kept = states.shape[:2]
    for sequence in sequences(causal_conv1d.rules, slots, state_ids, q_ends, fresh, past_lengths, x.shape[0]):
        at = sequence.past % kept
        known = None if sequence.fresh or sequence.slot is None else states[sequence.slot, at]
        before = x.new_zeros(x.shape[1], width) if known is None else known
        inputs = torch.cat([before, x[sequence.start : sequence.end].t()], dim=1)
        windows = inputs[:, 1:].unfold(1, width, 1)  # [channels, tokens, width]
        result = torch.einsum("ctk,ck->tc", windows.to(dtype), weight.to(dtype))
        if bias is not None:
            result = result + bias.to(dtype)
        out[sequence.start : sequence.end] = functional.silu(result) if silu else result
        length = sequence.end - sequence.start
        for taken in range(max(1, length - kept + 1), length + 1):
            if sequence.slot is not None:
                states[sequence.slot, (sequence.past + taken) % kept] = inputs[:, taken : taken + width]


@causal_conv1d.python_call
def _call_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_ids: Tensor,
    q_ends: Tensor,
    fresh: Tensor,
    silu: bool = True,
    past_lengths: Tensor | None = None,
) -> Tensor:
    """Compute, for token t of a sequence, activation(bias + sum over j of weight[:, j] * x[t - width + 1 + j]).

    The inputs before a sequence's first token are the last ``width`` inputs, read from its slot of conv_state. A fresh
    sequence reads zeros in their place. Afterwards the slot holds the last ``width`` inputs, these tokens included.

    x: [tokens, channels], with the sequences packed one after another; float32, float16 or bfloat16, any strides.
    weight: [channels, width].
    bias: [channels] or None. weight and bias have x's dtype.
    conv_state: [slots, channels, width], of x's dtype, the newest input last; any strides. With ``past_lengths`` it is
        [slots, kept, channels, width]: the inputs after each of the sequence's last ``kept`` tokens.
    state_ids: [sequences], int32 or int64: the slot of each sequence, no slot twice. A negative id means no slot: the
        state starts at zero and is not stored.
    q_ends: [sequences], int32 or int64, on any device: the index after each sequence's last token.
    fresh: [sequences], bool: the sequence begins here, so the old contents of its slot are not read.
    silu: the activation is x / (1 + exp(-x)); False means no activation.
    past_lengths: [sequences], int32 or int64, how many tokens each sequence has before these. Given, the call reads the
        inputs at ``past_lengths % kept`` of the slot, and stores those after n tokens of the sequence at n % kept, for
        the last ``kept`` of its tokens. So the next call may begin after any of these. None: a slot has one state.

    Returns a new tensor of x's shape and dtype; conv_state is mutated. Computed in float32 at least (as the causal
    convolution of Mamba, Gu and Dao, 2023, arXiv:2312.00752). Raises OpArgumentError, also for ends that
    decrease or do not end at the number of tokens, and for slots out of range.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    causal_conv1d.overload(x, weight, bias, conv_state, state_ids, q_ends, fresh, past_lengths, silu, out)
    return out


causal_conv1d.takes(
    x="float [tokens, channels]",
    weight="like x [channels, width]",
    bias="like x [channels]",
    conv_state="like x [..., channels, width]",
    state_ids="int on x [sequences]",
    q_ends="int [sequences]",
    fresh="bool on x [sequences]",
    past_lengths="int on x [sequences]",
    out="like x [tokens, channels]",
)


@causal_conv1d.check
def _check_causal_conv1d(rules: Rules, conv_state: Tensor, past_lengths: Tensor | None) -> None:
    check_states(rules, "conv_state", conv_state, 3, past_lengths)


@causal_conv1d.samples
def _causal_conv1d_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        lengths: list[int],
        channels: int,
        width: int,
        ids: list[int],
        fresh: list[bool],
        bias: bool = False,
        silu: bool = True,
        dtype: torch.dtype = torch.int64,
        past: list[int] | None = None,
        kept: int = 4,
    ) -> tuple[Any, ...]:
        x = make.tensor(sum(lengths), channels)
        return (
            x,
            make.tensor(channels, width, scale=width**-0.5),
            make.tensor(channels) if bias else None,
            make.tensor(6, *(() if past is None else (kept,)), channels, width),
            torch.tensor(ids, dtype=dtype, device=make.device),
            torch.tensor(lengths, dtype=dtype).cumsum(0, dtype=dtype),
            torch.tensor(fresh, dtype=torch.bool, device=make.device),
            None if past is None else torch.tensor(past, dtype=dtype, device=make.device),
            silu,
            torch.zeros_like(x),
        )

    yield Sample("decoding", case([1, 1, 1], 16, 4, [2, 0, 5], [False, False, False]))
    yield Sample("one fresh sequence", case([7], 24, 4, [3], [True]))
    yield Sample(
        "mixed lengths, int32",
        case([5, 1, 2, 9], 16, 4, [4, 1, 0, 2], [True, False, True, False], dtype=torch.int32),
    )
    yield Sample("with bias, no activation", case([3, 4], 8, 3, [1, 0], [False, True], True, False))
    yield Sample("no slot", case([2, 3, 1], 8, 4, [-1, 2, -1], [False, False, True]))
    yield Sample("decoding without a slot", case([1, 1], 8, 4, [-1, 2], [False, True]))
    yield Sample("a sequence without tokens", case([2, 0, 3], 8, 4, [1, 2, 3], [False, True, False]))
    yield Sample("no tokens", case([], 8, 4, [], []))
    yield Sample("width 1", case([3, 1], 8, 1, [1, 0], [False, True]))
    yield Sample(
        "several states in a slot",
        case(
            [4, 9, 1, 0, 2], 8, 4, [3, 1, -1, 2, 0], [False, True, False, False, False], past=[6, 0, 3, 2, 5]
        ),
    )
    yield Sample("decoding, several states", case([1, 1], 8, 4, [1, 0], [False] * 2, past=[7, 4], kept=2))
    args = case([4, 6], 12, 4, [0, 1], [True, False])
    slots = make.tensor(6, 3, 12, 4)[:, 1]
    yield Sample("slots with gaps", (*args[:3], slots, *args[4:]))
