"""The vendor's fused attention, within its documented limits.

Prompts take one call for each sequence, and a decode step takes one call for all sequences, both in layout BSND. Layout
TND could take several prompts in one call. But the documents allow TND only for bfloat16 without pages and a head size
of 192 (128 in the second version of the op).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.vendor.ascend import chips, refusing
from dlinfer.vendor.ascend.captured import CapturedLengths, Numbers

_EVERYTHING = 2147483647  # the default of pre_tokens and next_tokens
_TEMPLATE = 2048  # the side of the mask that sparse modes 3 and 4 read
_ALIGNED = 16  # head sizes are multiples of it
LARGEST_HEAD, MOST_HEADS, MOST_SHARING = 512, 256, 64
WIDEST = 65535  # heads times head size must be less


def refuses(call: Any, size: int) -> str | None:
    """Return a reason not to run a call on the fused attention; None if it takes the call.

    size: the head size of keys or of values, the larger one.
    """
    extras = {
        "logit_softcapping": call.logit_softcapping > 0,
        "alibi_slopes": call.alibi_slopes is not None,
        "sinks": call.sinks is not None,
    }
    unknown = [name for name, value in extras.items() if value]
    heads, kv_heads = call.num_q_heads, call.num_kv_heads
    if unknown:
        return f"npu_fused_infer_attention_score does not support {' or '.join(unknown)}"
    if size > LARGEST_HEAD:
        return f"head sizes up to {LARGEST_HEAD} are supported, not {size}"
    if heads > MOST_HEADS or heads > MOST_SHARING * kv_heads:
        return (
            f"up to {MOST_HEADS} heads, {MOST_SHARING} for each KV head, are supported, not {heads} and "
            f"{heads // kv_heads}"
        )
    if heads * aligned(size) >= WIDEST:
        return f"heads times head size must be below {WIDEST}, not {heads} x {aligned(size)}"
    return refusing.first(
        (
            refusing.lacking(chips.current().fused_attention, "npu_fused_infer_attention_score"),
            refusing.floating(call.q, refusing.HALVES),
        )
    )


def refuses_pages(call: Any, multiple: int, most: int) -> str | None:
    """Return a reason why the fused attention cannot read a call's caches; None if it can.

    multiple, most: the op's limits. The block size must be a multiple of ``multiple``, and at most ``most``.
    """
    k_cache, v_cache, block_size = call.k_cache, call.v_cache, call.block_size
    if block_size % multiple or block_size > most:
        return f"the block size must be a multiple of {multiple} up to {most}, not {block_size}"
    if k_cache.shape != v_cache.shape:
        return "paged keys and values must have the same head size"
    if k_cache.shape[3] % _ALIGNED:
        return f"paged head sizes must be a multiple of {_ALIGNED}, not {k_cache.shape[3]}"
    if k_cache.shape[2] * k_cache.shape[3] > WIDEST:
        return f"heads times head size of a cache must be at most {WIDEST}"
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "the caches are not contiguous"
    return None


def aligned(size: int) -> int:
    """Round a head size up to the vendor's alignment."""
    return -(-size // _ALIGNED) * _ALIGNED


def widened(x: Tensor, size: int) -> Tensor:
    """Return x, contiguous, with zeros appended to the last dimension up to ``size``.

    The zeros do not change attention scores.
    """
    return functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x.contiguous()


@cache
def template(device: torch.device) -> Tensor:
    """Return the mask that sparse modes 3 and 4 read: True above the diagonal. It serves sequences of any length."""
    return torch.ones(_TEMPLATE, _TEMPLATE, dtype=torch.bool, device=device).triu_(1)


def sight(device: torch.device, causal: bool, left: int, right: int) -> dict[str, Any]:
    """Return the mask arguments for a sequence with several queries. The last query is aligned with the last key.

    left, right: how many keys before and after its own position a query sees; negative: no limit.
    """
    if causal and left < 0:
        return {"sparse_mode": 3, "atten_mask": template(device)}
    ahead = 0 if causal else right
    if left < 0 and ahead < 0:
        return {"sparse_mode": 0}
    return {
        "sparse_mode": 4,
        "atten_mask": template(device),
        "pre_tokens": left if left >= 0 else _EVERYTHING,
        "next_tokens": ahead if ahead >= 0 else _EVERYTHING,
    }


def outside(kv_seqlens: Tensor, left: int, slots: int) -> Tensor:
    """Return the mask for one query of each sequence: bool [sequences, 1, 1, slots], True for slots it must not see.

    These are the slots after the sequence's end, and those more than ``left`` before its last token.
    """
    position = torch.arange(slots, device=kv_seqlens.device)
    last = kv_seqlens.view(-1, 1) - 1
    return ((position < last - left) | (position > last)).view(-1, 1, 1, slots)


def attend(q: Tensor, k: Tensor, v: Tensor, num_kv_heads: int, scale: float, **seen: Any) -> Tensor:
    """Call the fused attention once, in layout BSND.

    q: [sequences, tokens, heads, size]. k, v: [sequences, tokens, KV heads, size], or caches as ``pages`` views them.
    seen: more arguments of the op, such as masks, lengths and the block table.
    """
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        q,
        k,
        v,
        num_heads=q.shape[2],
        num_key_value_heads=num_kv_heads,
        scale=scale,
        input_layout="BSND",
        **seen,
    )
    return out


def told(lengths: list[int]) -> dict[str, Any]:
    """Return the op's argument for the number of keys of each sequence, when the keys are in pages."""
    return {"actual_seq_lengths_kv": lengths}


def attend_captured(
    tasks: CapturedLengths,
    numbers: Numbers,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_kv_heads: int,
    scale: float,
    **seen: Any,
) -> Tensor:
    """Capture a call of ``attend`` over pages as a task of the graph, and return its result.

    Each replay updates the task with the arguments that ``numbers`` returns for the step's lengths (``captured``).
    """
    shared: dict[str, Any] = {
        "num_heads": q.shape[2],
        "num_key_value_heads": num_kv_heads,
        "input_layout": "BSND",
    }
    out, ignored = torch.ops.npu._npu_fused_infer_attention_score_infer_output(
        q, v, block_table=seen["block_table"], **shared
    )
    # the lengths are the capture's, but the size is the largest that any lengths need
    workspace = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(
        q, k, v, scale=scale, **shared, **seen, **tasks.numbers_of(numbers)
    )
    tasks.run(
        torch.ops.npu.npu_fused_infer_attention_score.out,
        numbers,
        query=q,
        key=k,
        value=v,
        scale=scale,
        workspace=workspace,
        out=[out, ignored],
        **shared,
        **seen,
    )
    return out


def pages(cache_: Tensor) -> Tensor:
    """View a cache [blocks, block_size, heads, size] as layout BSND's [blocks, block_size, heads * size]."""
    return cache_.view(*cache_.shape[:2], -1)


def table(block_offsets: Tensor) -> Tensor:
    """Return a block table as int32, contiguous."""
    return block_offsets.to(torch.int32).contiguous()
