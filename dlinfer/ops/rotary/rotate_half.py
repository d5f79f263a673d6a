"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), rotate-half form, as in Llama."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

_ROUNDING = "both products and their sum are rounded to the tensor's dtype, as HF transformers does"
TOLERANCES = {
    torch.float32: Tolerance(2e-6, 2e-6, _ROUNDING),
    torch.float16: Tolerance(1e-3, 2e-3, _ROUNDING),
    torch.bfloat16: Tolerance(8e-3, 1.6e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The torch op behind ``dlinfer.ops.apply_rotary_pos_emb``."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    head_size = x.shape[-1]
    per_token = (*x.shape[:-2], 1, head_size)
    first, second = torch.split(x, head_size // 2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos.reshape(per_token) + rotated * sin.reshape(per_token)).contiguous()


@apply_rotary_pos_emb.python_call
def _call_apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_embed: Tensor | None = None,
    k_embed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by position: x * cos + rotate_half(x) * sin, where rotate_half((a, b)) = (-b, a).

    q: [tokens, q_heads, head_size] or [batch, tokens, q_heads, head_size], k: likewise with kv_heads; any strides.
    cos, sin: [..., head_size], one row for each token of q; dtype of q and k.
    q_embed, k_embed: must be None, because the results are always new tensors.

    Returns two contiguous tensors of q's and k's shape. Nothing is mutated. Computed in the tensors' own dtype: both
    products and their sum are rounded, so 16-bit results equal those of HF transformers' ``apply_rotary_pos_emb`` bit
    by bit. Raises OpArgumentError. Raises UnsupportedFeatureError if q_embed or k_embed is a tensor.
    """
    if q_embed is not None or k_embed is not None:
        raise UnsupportedFeatureError(
            feature="writing into q_embed and k_embed",
            where="dlinfer.ops.apply_rotary_pos_emb",
            advice="omit q_embed and k_embed, and use the returned tensors",
        )
    return apply_rotary_pos_emb.overload(q, k, cos, sin)


apply_rotary_pos_emb.takes(
    q="float [..., q_heads, head_size]",
    k="like q [..., kv_heads, head_size]",
    cos="like q [..., positions, head_size]",
    sin="like q [..., positions, head_size]",
    returns="like q [*q], like k [*k]",
)


@apply_rotary_pos_emb.check
def _check_apply_rotary_pos_emb(rules: Rules, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    rules.rank("q", q, 3, 4)
    rules.rank("k", k, q.dim())
    head_size = q.shape[-1]
    rules.require(head_size % 2 == 0, "q", "an even head size", lambda: tuple(q.shape))
    for dim in range(q.dim() - 2):
        rules.size("k", k, dim, q.shape[dim], "the tokens of q")
    tokens = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    for name, table in (("cos", cos), ("sin", sin)):
        rules.require(
            table.numel() == tokens * head_size,
            name,
            lambda: f"{tokens} rows, one for each token of q",
            lambda table=table: tuple(table.shape),
        )


@apply_rotary_pos_emb.samples
def _apply_rotary_pos_emb_samples(make: SampleMaker) -> Iterator[Sample]:
    def tables(tokens: int, head_size: int) -> tuple[Tensor, Tensor]:
        angles = make.tensor(tokens, head_size, scale=3.0)
        return angles.cos(), angles.sin()

    yield Sample("grouped heads", (make.tensor(9, 4, 16), make.tensor(9, 2, 16), *tables(9, 16)))
    yield Sample("one token", (make.tensor(1, 4, 64), make.tensor(1, 4, 64), *tables(1, 64)))
    yield Sample("no tokens", (make.tensor(0, 4, 16), make.tensor(0, 1, 16), *tables(0, 16)))
    cos, sin = tables(10, 8)
    batched = (make.tensor(2, 5, 4, 8), make.tensor(2, 5, 1, 8), cos.view(2, 5, 8), sin.view(2, 5, 8))
    yield Sample("4-d", batched)
    packed = make.tensor(7, 8, 32)  # q, k and v side by side, as a fused projection leaves them
    yield Sample("views of a packed qkv", (packed[:, :4], packed[:, 4:6], *tables(7, 32)))
