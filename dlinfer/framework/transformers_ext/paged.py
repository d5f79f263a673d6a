"""``attn_implementation="dlinfer_paged"``: a transformers model over a paged KV cache that the caller owns.

Callers pass the model one packed row of tokens, ``use_cache=False`` and ``pages=``. transformers passes ``pages`` on to
the attention of each layer. The attention writes the keys and values of the new tokens into their slots, and then
attends over the pages.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.transformers_ext.attention import refuse

NAME = "dlinfer_paged"


@dataclass
class Pages:
    """The paged KV cache of one forward, and the places of the forward's tokens in the cache.

    The forward mutates the caches.

    caches: a pair (keys, values) for each layer, at the index ``layer_idx``. Each tensor is [blocks, block_size,
        kv_heads, head_size] in the vendor's layout.
    slots: [tokens], int32 or int64, block * block_size + offset. A negative slot means that the token is not written.
    block_tables: [sequences, blocks], int32 or int64. Columns after a sequence's last block are not read.
    q_ends: [sequences], where each sequence's tokens end in the packed row, exclusive.
    kv_seqlens: [sequences], the number of keys of each sequence, new keys included.
    block_size: slots in a block.
    is_decode: whether each sequence has exactly one token.
    """

    caches: list[tuple[Tensor, Tensor]]
    slots: Tensor
    block_tables: Tensor
    q_ends: Tensor
    kv_seqlens: Tensor
    block_size: int
    is_decode: bool


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    pages: Pages | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention over pages, as transformers' AttentionInterface calls it. The layer's caches are mutated.

    query, key, value: the packed tokens of all sequences. query: [1, heads, tokens, size]. key: [1, kv_heads, tokens,
        size]. value: [1, kv_heads, tokens, value_size].
    sliding_window: the most keys that a query sees, its own key included.
    ``attention_forward`` describes the other arguments.

    Returns ([1, tokens, heads, value_size], None). Raises UnsupportedFeatureError for masks, for biases, for attention
    that is not causal, and if ``pages`` is None.
    """
    refuse(module, query, key, value, dropout, kwargs)
    layer = getattr(module, "layer_idx", None)
    if pages is None or layer is None:
        _refuse("a call without pages=Pages(...)", "generate from it with attn_implementation='dlinfer'")
    if attention_mask is not None or position_bias is not None:
        _refuse(
            "an attention mask or a score bias",
            "leave attention_mask out, because the pages say which keys are visible",
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        _refuse("attention that is not causal", "use a decoder model")
    k_cache, v_cache = pages.caches[layer]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    ops.fill_kv_cache(k, v, k_cache, v_cache, pages.slots)
    heads, kv_heads = q.shape[1], k.shape[1]
    longest = pages.block_tables.shape[1] * pages.block_size
    extras: dict[str, Any] = {
        "head_size_v": v.shape[2],
        "softmax_scale": scaling,
        "sliding_window": None if sliding_window is None else (sliding_window - 1, -1),
        "logit_softcapping": softcap,
        "sinks": s_aux,
    }
    if pages.is_decode:
        out = ops.paged_decode_attention(
            q,
            k_cache,
            v_cache,
            pages.block_tables,
            pages.block_size,
            pages.q_ends,
            pages.kv_seqlens,
            longest,
            heads,
            kv_heads,
            **extras,
        )
    else:
        out = ops.paged_prefill_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            pages.block_tables,
            pages.block_size,
            pages.q_ends,
            pages.kv_seqlens,
            q.shape[0],
            longest,
            heads,
            kv_heads,
            **extras,
        )
    return out[None], None


def _refuse(feature: str, advice: str) -> NoReturn:
    raise UnsupportedFeatureError(feature=feature, where='attn_implementation="dlinfer_paged"', advice=advice)
