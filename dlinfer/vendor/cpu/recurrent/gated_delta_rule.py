"""The gated delta rule: decoding takes one step of the rule, prefill cuts sequences into chunks.

Within a chunk, the changes of the state by all its tokens solve a unit triangular system (the WY form of Yang et al.,
2024, arXiv:2406.06484). So a few batched products compute all chunks of a batch. Only states pass from chunk to chunk,
in as many steps as the longest sequence has chunks."""

import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.ops.recurrent.gated_delta_rule import prepared
from dlinfer.ops.recurrent.sequence_states import check_numbers
from dlinfer.vendor.cpu.recurrent.slots import keep, place, states_of

_CHUNK = 64  # most tokens of a chunk


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
    slots, tokens = recurrent_state.shape[0], value.shape[0]
    ends = check_numbers(ops.gated_delta_rule.rules, slots, state_ids, q_ends, tokens)
    if not tokens:
        return
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k = (prepared(x, value.shape[1], dtype, normalise) for x in (query, key))
    q, v, rate, decay = q * scale, value.to(dtype), beta.to(dtype), decay.to(dtype)
    state = states_of(recurrent_state, state_ids, fresh, place(recurrent_state, past_lengths)).to(dtype)
    if ends == list(range(1, len(ends) + 1)):
        out.copy_(_step(q, k, v, decay, rate, state))
        keep(recurrent_state, state_ids, state, place(recurrent_state, past_lengths, 1))
        return
    lengths = torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
    if past_lengths is None:
        out.copy_(_chunked(q, k, v, decay, rate, state, lengths))
        keep(recurrent_state, state_ids, state, None, lengths > 0)
        return
    # The last tokens, whose states are stored, are computed one by one; those before them in chunks.
    single = lengths.clamp(max=recurrent_state.shape[1])
    before = lengths - single
    if bool(before.any()):
        number = torch.arange(tokens) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        rows = (number < torch.repeat_interleave(before, lengths)).nonzero()[:, 0]
        parts = (x.index_select(0, rows) for x in (q, k, v, decay, rate))
        out[rows] = _chunked(*parts, state=state, lengths=before).to(out.dtype)
    first = lengths.cumsum(0) - single
    for number in range(int(single.max())):
        going = (single > number).nonzero()[:, 0]
        rows = (first + number)[going]
        own = state.index_select(0, going)
        parts = (x.index_select(0, rows) for x in (q, k, v, decay, rate))
        out[rows] = _step(*parts, state=own).to(out.dtype)
        state.index_copy_(0, going, own)
        taken = (before + number + 1)[going]
        keep(recurrent_state, state_ids[going], own, place(recurrent_state, past_lengths[going], taken))


def _step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """Apply the rule to one token of each sequence: update ``state``, and return the outputs."""
    state.mul_(decay.exp()[:, :, None, None])
    error = (v - _read(state, k)).mul_(rate[:, :, None])
    state.addcmul_(error[..., None], k[:, :, None])
    return _read(state, q)


def _read(state: Tensor, x: Tensor) -> Tensor:
    """Return the batched matrix-vector product of state [..., value size, key size] and x [..., key size]."""
    return (state @ x[..., None])[..., 0]


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor, lengths: Tensor
) -> Tensor:
    """Apply the rule to packed sequences, and return the outputs of all tokens, [tokens, heads, value size].

    q, k, v: [tokens, heads, size]; q is scaled already.
    decay: [tokens, heads], the logarithm of the state's factor. rate: [tokens, heads], the op's ``beta``.
    lengths: how many tokens each sequence has.
    state: [sequences, heads, value size, key size]; the new states are written into it."""
    longest = int(lengths.max())
    size = min(_CHUNK, 1 << (longest - 1).bit_length())
    counts = (lengths + (size - 1)) // size
    first = counts.cumsum(0) - counts
    tokens, chunks = len(q), int(counts.sum())
    offset = first * size - (lengths.cumsum(0) - lengths)
    rows = torch.arange(tokens) + torch.repeat_interleave(offset, lengths, output_size=tokens)

    def cut(x: Tensor) -> Tensor:
        """Cut [tokens, heads, ...] into [chunks, heads, size, ...], with zeros behind a sequence's last token."""
        padded = x.new_zeros(chunks * size, *x.shape[1:]).index_copy_(0, rows, x)
        return padded.unflatten(0, (chunks, size)).transpose(1, 2).contiguous()

    q, k, v, decay, rate = (cut(x) for x in (q, k, v, decay, rate[..., None]))
    total = decay.cumsum(-1)  # log of the decay from the chunk's beginning to each token
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    seen = total.exp()[..., None]
    keys = k.transpose(-1, -2)
    system = ((k * rate) @ keys).mul_(between)  # only the part below the diagonal is read
    right = torch.cat([v * rate, k * rate * seen], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, known = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ keys).mul_(between)
    q = q * seen
    left = k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    result = torch.empty_like(v)
    for step in range(int(counts.max())):
        going = (counts > step).nonzero()[:, 0]
        here = (first + step)[going]
        before = state.index_select(0, going)
        turned = before.transpose(-1, -2)
        new = torch.baddbmm(
            written[here].flatten(0, 1), known[here].flatten(0, 1), turned.flatten(0, 1), alpha=-1
        ).unflatten(0, turned.shape[:2])
        result[here] = q[here] @ turned + scores[here] @ new
        state.index_copy_(0, going, before * kept[here] + new.transpose(-1, -2) @ left[here])
    return result.transpose(1, 2).flatten(0, 1).index_select(0, rows)
