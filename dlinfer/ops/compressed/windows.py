"""Compress windows of tokens into one key each, as DeepSeek-V4 does before its compressed attention.

Source: DeepSeek-V4 (2026), sections 2.3.1 and 2.3.2, as transformers' DeepseekV4CSACompressor and
DeepseekV4HCACompressor compute it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.attention.semantics import TOLERANCES
from dlinfer.ops.core.checks import Rules, ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.recurrent.sequence_states import check_numbers


@fused_op(tolerances=TOLERANCES, mutates=("state", "out"))
def compress_windows(
    x: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    state: Tensor,
    state_ids: Tensor,
    q_ends: Tensor,
    past_lengths: Tensor,
    out: Tensor,
) -> None:
    """The torch op behind ``dlinfer.ops.compress_windows``, which documents the arguments.

    out: [tokens, size], gets the result; it shares no memory with another argument.
    """
    length, width = position_bias.shape
    size, rows = out.shape[1], state.shape[2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    ends = check_numbers(compress_windows.rules, state.shape[0], state_ids, q_ends, x.shape[0])
    out.zero_()
    start = 0
    for end, slot, past in zip(ends, ints(state_ids), ints(past_lengths), strict=True):
        # The last ``kept`` earlier tokens of the sequence, then its new tokens; the first has position ``first``.
        kept = min(past, rows)
        first, last = past - kept, past + end - start
        known = torch.arange(first, past, device=x.device) % rows
        bias = position_bias[torch.arange(past, last, device=x.device) % length]
        before = state[slot].to(dtype)[:, known] if slot >= 0 else x.new_zeros(2, kept, width, dtype=dtype)
        values = torch.cat((before[0], x[start:end].to(dtype)))
        scores = torch.cat((before[1], gate[start:end].to(dtype) + bias.to(dtype)))
        for position in range(past, last):
            if (position + 1) % length:
                continue
            here = slice(position + 1 - length - first, position + 1 - first)
            parts = [(values[here, -size:], scores[here, -size:])]
            if width > size and position >= length:
                earlier = slice(here.start - length, here.start)
                parts.insert(0, (values[earlier, :size], scores[earlier, :size]))
            mixed, weights = (torch.cat(part) for part in zip(*parts, strict=True))
            out[start + position - past] = (mixed * weights.softmax(0)).sum(0)
        if slot >= 0 and end > start:
            newest = torch.arange(max(first, last - rows), last, device=x.device)
            state[slot, 0, newest % rows] = values[newest - first].to(state.dtype)
            state[slot, 1, newest % rows] = scores[newest - first].to(state.dtype)
        start = end


@compress_windows.python_call
def _call_compress_windows(
    x: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    state: Tensor,
    state_ids: Tensor,
    q_ends: Tensor,
    past_lengths: Tensor,
    size: int,
) -> Tensor:
    """Compress each window of L tokens of a sequence into one row: sum over tokens of softmax(gate + bias) * x.

    The token at position p of its sequence is in window p // L, and its bias is position_bias[p % L]. The softmax is
    over the tokens of a window, for each column on its own. With width = 2 * size, windows overlap. Then the row of a
    window is a sum over its own tokens and those of the window before it, if there is one. It reads the last ``size``
    columns of its own tokens, and the first ``size`` columns of the earlier ones.

    x, gate: [tokens, width], with the sequences packed one after another; float32, float16 or bfloat16, any strides.
    position_bias: [L, width], any floating dtype.
    state: [slots, 2, rows, width], any floating dtype and strides: of each sequence's last tokens x in [:, 0], and
        gate + bias in [:, 1]. The token at position p is in row p % rows. rows is at least L, and 2 * L if windows
        overlap.
    state_ids: [sequences], int32 or int64: the slot of each sequence, no slot twice. A negative id means no slot: the
        earlier tokens of the sequence count as zeros, and its tokens are not stored.
    q_ends: [sequences], int32 or int64, on any device: the index after each sequence's last token.
    past_lengths: [sequences], int32 or int64: how many tokens each sequence has before these.
    size: width, or width / 2 if windows overlap.

    Returns a new tensor [tokens, size] of x's dtype: the row of each window's last token is the row of that window; the
    rows of other tokens are zeros. state is mutated. Computed in float32 at least and rounded once. Raises
    OpArgumentError, also for ends that decrease or do not end at the number of tokens, and for slots out of range.
    """
    out = x.new_empty(x.shape[0], size)
    compress_windows.overload(x, gate, position_bias, state, state_ids, q_ends, past_lengths, out)
    return out


compress_windows.takes(
    x="float [tokens, width]",
    gate="like x [tokens, width]",
    position_bias="float on x [length, width]",
    state="float on x [slots, 2, rows, width]",
    state_ids="int on x [sequences]",
    q_ends="int [sequences]",
    past_lengths="int on x [sequences]",
    out="like x [tokens, size]",
)


@compress_windows.check
def _check_compress_windows(
    rules: Rules, x: Tensor, position_bias: Tensor, state: Tensor, out: Tensor
) -> None:
    width, size = x.shape[1], out.shape[1]
    rules.require(
        size == width or 2 * size == width, "out", lambda: f"{width} or {width} / 2 columns", lambda: size
    )
    length = position_bias.shape[0]
    least = length if size == width else 2 * length
    rules.require(
        length >= 1 and state.shape[2] >= least,
        "state",
        lambda: f"at least {least} rows",
        lambda: state.shape[2],
    )


@compress_windows.samples
def _compress_windows_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        lengths: list[int],
        past: list[int],
        ids: list[int],
        window: int,
        size: int,
        overlaps: bool,
        dtype: torch.dtype = torch.int64,
    ) -> tuple[Any, ...]:
        tokens, width = sum(lengths), size * (1 + overlaps)
        return (
            make.tensor(tokens, width),
            make.tensor(tokens, width),
            make.tensor(window, width),
            make.tensor(6, 2, window * (1 + overlaps), width),
            torch.tensor(ids, dtype=dtype, device=make.device),
            torch.tensor(lengths, dtype=dtype).cumsum(0, dtype=dtype),
            torch.tensor(past, dtype=dtype, device=make.device),
            make.tensor(tokens, size),
        )

    yield Sample("one fresh sequence", case([11], [0], [3], 4, 8, True))
    yield Sample("decoding", case([1, 1, 1], [3, 7, 12], [2, 0, 5], 4, 8, True))
    yield Sample("decoding, apart", case([1, 1, 1, 1], [2, 8, 5, 0], [2, 0, 5, 1], 3, 16, False))
    yield Sample("continued, int32", case([7, 1, 9], [5, 2, 22], [4, 1, 0], 4, 8, True, torch.int32))
    yield Sample("windows apart", case([7, 3, 20], [0, 6, 13], [4, 1, 0], 5, 8, False))
    yield Sample("no slot", case([6, 5], [2, 3], [-1, 2], 4, 8, True))
    yield Sample("a sequence without tokens", case([4, 0, 9], [0, 3, 2], [1, 2, 3], 4, 8, True))
    yield Sample("no tokens", case([], [], [], 4, 8, True))
    yield Sample("windows of one token", case([3, 1], [0, 2], [0, 1], 1, 8, False))
