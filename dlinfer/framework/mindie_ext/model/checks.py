"""Check a forward's arguments before anything is written."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlinfer.framework.mindie_ext.errors import GeneratorCallError
from dlinfer.framework.mindie_ext.model.model_info import ModelInfo
from dlinfer.ops.attention.kv_cache import canonical


@dataclass(frozen=True)
class Forward:
    """The tensor arguments of ``GeneratorTorch.forward_tensor``. rows: the argument lm_head_indices."""

    input_ids: Tensor
    position_ids: Tensor | None
    block_tables: Tensor
    slots: Tensor
    input_lengths: Tensor
    q_lens: Tensor | None
    rows: Tensor | None


def check_forward(
    forward: Forward,
    kv_cache: list[tuple[Tensor, Tensor]],
    is_prefill: bool,
    block_size: int,
    info: ModelInfo,
    vocab_size: int,
) -> Forward:
    """Check a forward's arguments, and return them with defaults filled in. Raises GeneratorCallError."""
    tokens, sequences = len(forward.input_ids), len(forward.input_lengths)
    for name in ("input_ids", "slots", "input_lengths", "position_ids", "q_lens", "rows"):
        _integers(name, getattr(forward, name), 1)
    _integers("block_tables", forward.block_tables, 2)
    _require(tokens > 0, "input_ids", "at least one token", tokens)
    _require(len(forward.slots) == tokens, "slots", f"{tokens} slots, one for each token", len(forward.slots))
    tables = tuple(forward.block_tables.shape)
    _require(tables[0] == sequences, "block_tables", f"[{sequences}, blocks]", tables)
    counts = forward.q_lens
    if counts is None:
        counts = forward.input_lengths if is_prefill else torch.ones_like(forward.input_lengths)
    _require(len(counts) == sequences, "q_lens", f"{sequences} lengths, one for each sequence", len(counts))
    total = int(counts.sum())
    _require(total == tokens, "input_lengths", f"lengths that add up to {tokens} tokens", total)
    _require(bool((counts >= 1).all()), "q_lens", "at least one token for each sequence", counts.tolist())
    _require(
        is_prefill or total == sequences,
        "is_prefill",
        "true, because there are more tokens than sequences",
        is_prefill,
    )
    longer = bool((counts <= forward.input_lengths).all())
    _require(longer, "input_lengths", "at least the number of new tokens", forward.input_lengths.tolist())
    ids = forward.input_ids
    inside = int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    _require(inside, "input_ids", f"ids from 0 to {vocab_size - 1}", f"{int(ids.min())} to {int(ids.max())}")
    _check_pages(forward, kv_cache, block_size, info)
    positions = forward.position_ids
    if positions is None:
        starts = forward.input_lengths - counts
        offsets = torch.arange(tokens, device=ids.device) - (counts.cumsum(0) - counts).repeat_interleave(
            counts
        )
        positions = starts.repeat_interleave(counts) + offsets
    _require(
        len(positions) == tokens, "position_ids", f"{tokens} positions, one for each token", len(positions)
    )
    _require(int(positions.min()) >= 0, "position_ids", "no negative positions", int(positions.min()))
    rows = forward.rows
    if rows is None or not is_prefill:
        rows = torch.arange(tokens, device=ids.device)
    inside = not len(rows) or (int(rows.min()) >= 0 and int(rows.max()) < tokens)
    _require(inside, "lm_head_indices", f"indices from 0 to {tokens - 1}", rows.tolist())
    _require(len(rows) > 0, "lm_head_indices", "at least one token", 0)
    return replace(
        forward, input_ids=ids.long(), position_ids=positions.long(), q_lens=counts.long(), rows=rows.long()
    )


def _check_pages(
    forward: Forward, kv_cache: list[tuple[Tensor, Tensor]], block_size: int, info: ModelInfo
) -> None:
    _require(len(kv_cache) == info.num_layers, "kv_cache", f"{info.num_layers} layers", len(kv_cache))
    keys = canonical(kv_cache[0][0])
    blocks = keys.shape[0]
    _require(keys.dtype == info.dtype, "kv_cache", str(info.dtype), keys.dtype)
    fits = keys.shape[2] == info.num_kv_heads and keys.shape[1] == block_size
    expected = f"blocks of {block_size} slots of {info.num_kv_heads} heads"
    _require(fits, "kv_cache", expected, tuple(keys.shape))
    highest = int(forward.slots.max())
    _require(highest < blocks * block_size, "slots", f"slots below {blocks * block_size}", highest)
    needed = -(-forward.input_lengths // block_size)
    width = forward.block_tables.shape[1]
    most = int(needed.max())
    _require(width >= most, "block_tables", f"{most} blocks for the longest sequence", width)
    used = torch.arange(width, device=needed.device) < needed[:, None]
    outside = used & ((forward.block_tables < 0) | (forward.block_tables >= blocks))
    _require(not bool(outside.any()), "block_tables", f"blocks below {blocks}", forward.block_tables.tolist())


def _integers(name: str, tensor: Tensor | None, rank: int) -> None:
    if tensor is None:
        return
    actual = f"{tensor.dtype} {tuple(tensor.shape)}"
    whole = tensor.dtype in (torch.int32, torch.int64)
    name = "lm_head_indices" if name == "rows" else name
    _require(whole and tensor.dim() == rank, name, f"int32 or int64 with {rank} dimension(s)", actual)


def _require(holds: bool, argument: str, expected: str, actual: object) -> None:
    if not holds:
        shown = repr(actual)
        actual = actual if len(shown) <= 100 else shown[:100] + "..."
        raise GeneratorCallError(call="forward_tensor", argument=argument, expected=expected, given=actual)
