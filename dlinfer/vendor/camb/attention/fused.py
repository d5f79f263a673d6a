"""Common rules of the vendor's two attention ops: features that they lack, and outputs that they can write."""

from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.camb import layouts, refusing


def refuses(call: Any) -> str | None:
    """Return a reason, shared by both attention ops, to refuse a call; None if there is none."""
    if call.logit_softcapping > 0:
        return "torch_mlu_ops does not support logit_softcapping"
    if call.alibi_slopes is not None:
        return "torch_mlu_ops does not document the formula of its alibi_slope"
    if call.sinks is not None:
        return (
            "torch_mlu_ops does not document the formula of its sink, and the argument's name changes between "
            "versions"
        )
    return refusing.floating(call.q)


def refuses_pages(call: Any, sizes: tuple[int, ...]) -> str | None:
    """Return a reason not to read a call's caches; None if the op can read them. sizes: the op's block sizes."""
    if call.block_size not in sizes:
        return f"blocks of {', '.join(map(str, sizes))} slots are supported, not of {call.block_size}"
    dense = call.k_cache.is_contiguous() and call.v_cache.is_contiguous()
    if not dense and not layouts.is_latent(call.k_cache, call.v_cache):
        return "the caches are not contiguous"
    return None


def destination(attn_output: Tensor, *read: Tensor) -> Tensor:
    """Return the tensor that the op shall write its result to: attn_output, or a new tensor of its shape.

    A new one is needed if attn_output shares memory with an input (``read``) or if its heads have gaps.
    """
    place = attn_output.untyped_storage()._cdata
    if any(tensor.untyped_storage()._cdata == place for tensor in read) or not layouts.has_dense_heads(
        attn_output
    ):
        return torch.empty(attn_output.shape, dtype=attn_output.dtype, device=attn_output.device)
    return attn_output
