"""Larger samples than the ops' own, for the self-test: sizes on both sides of the C++ kernels' thresholds."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.attention.samples import (
    Case,
    decode_arguments,
    lengths,
    new_tokens,
    paged_prefill_arguments,
    queries,
    scoring,
)
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised import bf12, eight_bit
from dlinfer.ops.quantised.gguf_samples import packed
from dlinfer.ops.quantised.linear_fp8 import blocked_weight
from dlinfer.ops.quantised.linear_w8a8 import quantised_weight

ROWS = (1, 2, 7, 40, 65, 130)
"""Numbers of rows on both sides of each threshold where another C++ kernel takes over."""

_FP8_ROWS = (1, 2, 3, 4, 16, 40)
"""Numbers of rows that use every tile size of the float8 kernel, and more rows than the kernel takes."""

_EXPERTS, _HIDDEN, _INNER, _TOKENS = 5, 72, 40, 300

Arguments = Iterator[tuple[Any, ...]]


def _weight(make: SampleMaker, out_features: int, in_features: int) -> Tensor:
    return make.tensor(out_features, in_features, scale=in_features**-0.5)


def _linear(make: SampleMaker) -> Arguments:
    for rows in ROWS:
        yield make.tensor(rows, 200), _weight(make, 70, 200), make.tensor(70)


def _linears(make: SampleMaker) -> Arguments:
    for rows in ROWS:
        weights = [_weight(make, 70, 200), _weight(make, 33, 200)]
        yield make.tensor(rows, 200), weights, [make.tensor(70), None]


def _linear_bf12(make: SampleMaker) -> Arguments:
    for columns in (256, 200):  # whole groups, and a part of one
        weight = _weight(make, 70, columns).bfloat16()
        weight[7] *= 2.0**-40  # exceptions of the packing
        for rows in ROWS:
            yield make.tensor(rows, columns), bf12.pack(weight), make.tensor(70), 70


def _linear_gguf(make: SampleMaker) -> Arguments:
    types, sizes = [12, 14, 8, 2, 30], [33, 18, 7, 20, 5]
    weight = packed(make, types, sizes, 1280)  # more columns than are unpacked at a time
    for rows in ROWS:
        yield make.tensor(rows, 1280), weight, make.tensor(sum(sizes)), types, sizes


def _linear_w8a8(make: SampleMaker) -> Arguments:
    weight, weight_scale = quantised_weight(make, torch.int8, 70, 203)
    for rows in ROWS:
        numbers, scale = eight_bit.per_token(make.tensor(rows, 203), torch.int8)
        yield numbers, weight, scale, weight_scale, make.dtype, torch.int8, make.tensor(70)


def _linear_blocked_fp8(make: SampleMaker) -> Arguments:
    for rows in _FP8_ROWS:
        yield make.tensor(rows, 203), *blocked_weight(make, 16, 70, 203), make.tensor(70), 16, False


def _choices(make: SampleMaker) -> tuple[Tensor, Tensor]:
    """Choose experts for tokens: expert 2 gets none, and each other expert gets one, some or many."""
    ids = torch.tensor([[3, 1]]).repeat(_TOKENS, 1)
    ids[7, 1], ids[40:, 1] = 0, 4
    return make.integers(1, 4, _TOKENS, 2) / 4, ids


def _stacks(make: SampleMaker) -> tuple[Tensor, Tensor]:
    gate_up = make.tensor(_EXPERTS, 2 * _INNER, _HIDDEN, scale=_HIDDEN**-0.5)
    return gate_up, make.tensor(_EXPERTS, _HIDDEN, _INNER, scale=_INNER**-0.5)


def _fused_moe(make: SampleMaker) -> Arguments:
    yield make.tensor(_TOKENS, _HIDDEN), *_stacks(make), *_choices(make), 2, False


def _fused_moe_clamped(make: SampleMaker) -> Arguments:
    gate_up, down = _stacks(make)
    weights = gate_up, make.tensor(_EXPERTS, 2 * _INNER), down, make.tensor(_EXPERTS, _HIDDEN)
    yield make.tensor(_TOKENS, _HIDDEN), *weights, *_choices(make), 1.5, 2.0


def _fused_moe_bf12(make: SampleMaker) -> Arguments:
    x, (weights, ids) = make.tensor(_TOKENS, _HIDDEN), _choices(make)
    packed = [bf12.pack(stack.flatten(0, 1)) for stack in _stacks(make)]
    for tokens in (9, _TOKENS):
        yield x[:tokens], *packed, weights[:tokens], ids[:tokens], False, _EXPERTS, _INNER


_PREFILL = Case("long", (150, 70), (150, 200), (6, 2), (40, 36), 16, window=(120, -1))
_DECODE = Case("long", (1, 1), (300, 40), (6, 2), (40, 40), 16, window=(200, -1))


def _prefill(make: SampleMaker) -> Arguments:
    q, out = queries(make, _PREFILL)
    sizes = *lengths(_PREFILL), max(_PREFILL.q_lens), *_PREFILL.heads
    yield q, *new_tokens(make, _PREFILL), *sizes, out, *scoring(make, _PREFILL)


LARGER: Mapping[str, Callable[[SampleMaker], Arguments]] = {
    "linear": _linear,
    "linears": _linears,
    "linear_bf12": _linear_bf12,
    "linear_gguf": _linear_gguf,
    "linear_w8a8": _linear_w8a8,
    "linear_blocked_fp8": _linear_blocked_fp8,
    "fused_moe": _fused_moe,
    "fused_moe_clamped": _fused_moe_clamped,
    "fused_moe_bf12": _fused_moe_bf12,
    "prefill_attention": _prefill,
    "paged_prefill_attention": lambda make: iter([paged_prefill_arguments(make, _PREFILL)]),
    "paged_decode_attention": lambda make: iter([decode_arguments(make, _DECODE)]),
}
