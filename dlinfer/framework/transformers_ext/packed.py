"""``attn_implementation="dlinfer_packed"``: a transformers model over texts that lie end to end in one row of tokens.

No token is padding. Callers pass the model one row of tokens, position ids that begin anew with each text, no attention
mask, and ``packing=``. transformers passes ``packing`` on to the attention of each layer.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.transformers_ext.attention import refuse

NAME = "dlinfer_packed"


@dataclass
class Packing:
    """Where the texts of a packed row begin and end.

    ends: [texts] int64, the index after each text's last token.
    lengths: [texts] int64, the number of tokens of each text.
    """

    ends: Tensor
    lengths: Tensor


def packed_attention_forward(
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
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each text, as transformers' AttentionInterface calls it. Nothing is mutated.

    query: [1, heads, tokens, size]. key: [1, kv_heads, tokens, size]. value: [1, kv_heads, tokens, value_size].
    sliding_window: a query sees the keys of its text that are fewer tokens away than this number.
    ``attention_forward`` describes the other arguments.

    Returns ([1, tokens, heads, value_size], None). Raises UnsupportedFeatureError for masks, for biases, and if
    ``packing`` is None.
    """
    refuse(module, query, key, value, dropout, kwargs)
    if packing is None:
        _refuse("a call without packing=Packing(...)")
    if attention_mask is not None or position_bias is not None:
        _refuse("an attention mask or a score bias")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    reach = None if sliding_window is None else sliding_window - 1
    out = ops.prefill_attention(
        q,
        k,
        v,
        None,
        None,
        packing.lengths,
        packing.lengths,
        q.shape[0],
        q.shape[1],
        k.shape[1],
        softmax_scale=scaling,
        actual_seq_lengths_cpu=packing.ends,
        head_size_v=v.shape[2],
        causal=causal,
        sliding_window=None if reach is None else (reach, -1 if causal else reach),
        logit_softcapping=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _refuse(feature: str) -> NoReturn:
    raise UnsupportedFeatureError(
        feature=feature,
        where='attn_implementation="dlinfer_packed"',
        advice='pass packing=Packing(...) and no mask, or use attn_implementation="dlinfer"',
    )
