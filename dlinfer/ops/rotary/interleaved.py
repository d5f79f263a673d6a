"""Rotary position embedding of adjacent pairs, as in GPT-J, GLM, Cohere and DeepSeek."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.rotary.rotate_half import TOLERANCES


@fused_op(tolerances=TOLERANCES)
def apply_rotary_pos_emb_interleaved(
    native_input: Tensor, cos: Tensor, sin: Tensor, return_native_layout: bool
) -> Tensor:
    """Rotate each pair (a, b) = (x[2i], x[2i + 1]) to (a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]).

    native_input: 3 or 4 dimensions, [..., size] with an even size, any strides; LMDeploy's is
    [tokens, q_heads + kv_heads, 1, size].
    cos, sin: of native_input's dtype, [..., size] or [..., size / 2], with leading dimensions that broadcast to
    native_input's (LMDeploy's [tokens, 1, 1, size]). Only the first size / 2 columns are read; in [..., size] the
    second half repeats the first, as in cat((freqs, freqs)).
    return_native_layout: True returns all a's, then all b's, the layout that vendors' kernels leave
    (torch_npu.npu_interleave_rope); False returns pairs again.

    Returns a new contiguous tensor of native_input's shape. Nothing is mutated. Both products and their sum are
    rounded to the dtype, as HF transformers does. Raises OpArgumentError.
    """
    half = native_input.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second = native_input[..., 0::2], native_input[..., 1::2]
    rotated = first * cos - second * sin, second * cos + first * sin
    if return_native_layout:
        return torch.cat(rotated, dim=-1)
    return torch.stack(rotated, dim=-1).flatten(-2)


apply_rotary_pos_emb_interleaved.takes(
    native_input="float [..., size]",
    returns="like native_input [*native_input]",
)


@apply_rotary_pos_emb_interleaved.check
def _check_apply_rotary_pos_emb_interleaved(
    rules: Rules, native_input: Tensor, cos: Tensor, sin: Tensor
) -> None:
    shape = native_input.shape
    rules.rank("native_input", native_input, 3, 4)
    rules.require(shape[-1] % 2 == 0, "native_input", "an even last dimension", lambda: tuple(shape))
    for name, table in (("cos", cos), ("sin", sin)):
        rules.like(name, table, "native_input", native_input)
        rules.require(
            1 <= table.dim() <= native_input.dim() and table.shape[-1] in (shape[-1], shape[-1] // 2),
            name,
            "a last dimension of native_input's size or half of it, and no more dimensions",
            lambda table=table: tuple(table.shape),
        )
        for dim in range(2, table.dim() + 1):
            # One condition, because an unbacked size cannot choose a branch.
            rules.require(
                (table.shape[-dim] == shape[-dim]) | (table.shape[-dim] == 1),
                name,
                lambda dim=dim: f"size {shape[-dim]} or 1 in dimension {-dim} (native_input's size)",
                lambda table=table: tuple(table.shape),
            )


@apply_rotary_pos_emb_interleaved.samples
def _apply_rotary_pos_emb_interleaved_samples(make: SampleMaker) -> Iterator[Sample]:
    def tables(*shape: int) -> tuple[Tensor, Tensor]:
        angles = make.tensor(*shape, scale=3.0)
        return angles.cos(), angles.sin()

    cos, sin = (torch.cat((table, table), dim=-1) for table in tables(9, 1, 1, 8))
    yield Sample("LMDeploy's query and key, halves", (make.tensor(9, 6, 1, 16), cos, sin, True))
    yield Sample("LMDeploy's query and key, pairs", (make.tensor(9, 6, 1, 16), cos, sin, False))
    yield Sample("tables of half the size", (make.tensor(2, 5, 4, 16), *tables(1, 5, 1, 8), False))
    yield Sample("heads before tokens", (make.tensor(2, 5, 4, 16).transpose(1, 2), *tables(2, 1, 5, 8), True))
    yield Sample("part of the head", (make.tensor(2, 5, 4, 32)[..., :16], *tables(5, 1, 8), False))
    yield Sample("no tokens", (make.tensor(0, 4, 1, 16), *tables(0, 1, 1, 16), True))
