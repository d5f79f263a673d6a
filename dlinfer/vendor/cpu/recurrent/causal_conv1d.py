"""A causal convolution over packed sequences: put each sequence's state before its tokens, then sum shifted rows."""

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer import ops
from dlinfer.ops.recurrent.sequence_states import check_numbers
from dlinfer.vendor.cpu.recurrent.slots import keep, place, states_of


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
    ends = check_numbers(ops.causal_conv1d.rules, conv_state.shape[0], state_ids, q_ends, x.shape[0])
    if not x.shape[0]:
        return
    batch, width = len(ends), weight.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.t().to(dtype)
    before = states_of(conv_state, state_ids, fresh, place(conv_state, past_lengths)).transpose(1, 2)
    if ends == list(range(1, batch + 1)):
        inputs = torch.cat([before[:, 1:], x[:, None]], dim=1)
        result = (inputs.to(dtype) * taps).sum(1)
        keep(conv_state, state_ids, inputs.transpose(1, 2), place(conv_state, past_lengths, 1))
    else:
        # Each sequence's tokens follow its last `width` inputs: token t of sequence b is row t + (b + 1) * width.
        behind = torch.tensor(ends)
        lengths = behind.diff(prepend=behind.new_zeros(1))
        last = behind + torch.arange(1, batch + 1) * width
        rows = torch.arange(len(x)) + torch.repeat_interleave(
            torch.arange(1, batch + 1) * width, lengths, output_size=len(x)
        )
        inputs = x.new_empty(len(x) + batch * width, x.shape[1])
        inputs.index_copy_(0, rows, x)
        window = torch.arange(-width, 0)
        inputs.index_copy_(0, ((last - lengths)[:, None] + window).flatten(), before.flatten(0, 1))
        sums = inputs[1 : len(inputs) - width + 1].to(dtype) * taps[0]
        for tap in range(1, width):
            sums.addcmul_(inputs[1 + tap : len(inputs) - width + 1 + tap].to(dtype), taps[tap])
        result = sums.index_select(0, rows - width)
        for back in range(1 if past_lengths is None else conv_state.shape[1]):
            # A sequence with fewer tokens has no such row. Any row will do, since it is not stored.
            own = ((last - back)[:, None] + window).clamp(min=0)
            newest = inputs.index_select(0, own.flatten())
            states = newest.unflatten(0, (batch, width)).transpose(1, 2)
            keep(
                conv_state, state_ids, states, place(conv_state, past_lengths, lengths - back), lengths > back
            )
    if bias is not None:
        result += bias.to(dtype)
    out.copy_(functional.silu(result, inplace=True) if silu else result)
