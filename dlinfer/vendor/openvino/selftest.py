"""The self-test of OpenVINO's CPU plugin: the cases of every engine, and the plugin's own attention.

The plugin has different kernels for AVX2, AVX-512, bfloat16, float16 and AMX. Some kernels for newer instructions have
been wrong where the AVX2 kernels were right: in comparisons of NaN, and in paged attention in float16.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import openvino as ov
import torch
from torch import Tensor

from dlinfer.graph.engine import Engine
from dlinfer.graph.functional.functional_ops import functional_op
from dlinfer.graph.selftest.case import Case, packet_name
from dlinfer.graph.selftest.suite import SelfTest
from dlinfer.graph.selftest.torch_cases import FLOATS, TORCH_CASES, TorchCase, engine_cases
from dlinfer.ops.attention.semantics import Scoring, attend
from dlinfer.vendor.openvino.layout import LAYOUT
from dlinfer.vendor.openvino.lowerings.paged import foreign_layout
from dlinfer.vendor.openvino.options import OpenVINOOptions
from dlinfer.vendor.openvino.passes.cached_attention import CACHED_ATTENTION

BLOCK, HEADS, KV_HEADS, SIZE = LAYOUT.block_size or 0, 4, 2, 64
SEQUENCES = ((3, 40), (1, 0), (37, 31))
"""The numbers of new and of old tokens of each sequence.

The old tokens fill more than a block, none, and all but one slot of a block.
"""

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Tolerances of attention over up to 68 keys, summed in any order.

In 16 bits they cover the rounding of probabilities.
"""


def selftest(engine: Engine) -> SelfTest:
    return SelfTest(_version, lambda: cases(engine))


def cases(engine: Engine) -> Iterator[Case]:
    return engine_cases(engine, asdict(OpenVINOOptions()), [*TORCH_CASES, *PAGED], FLOATS)


def _version() -> str:
    return f"OpenVINO {ov.__version__.split('-')[0]}"


# --- attention over the cache


def _step(sequences: tuple[tuple[int, int], ...]) -> Callable[[torch.dtype], list[Tensor]]:
    """Return a function that makes the inputs of an attention in a dtype.

    sequences: the numbers of new and of old tokens of each sequence.

    The inputs are q, k, v, both caches, slots, table of blocks, ends of queries, and lengths."""

    def inputs(dtype: torch.dtype) -> list[Tensor]:
        tokens = sum(new for new, _ in sequences)
        table = torch.tensor([[5, 2, 9, 0], [7, 1, 3, 11], [4, 10, 6, 8]])  # shuffled blocks
        slots = [
            int(table[row, position // BLOCK]) * BLOCK + position % BLOCK
            for row, (new, old) in enumerate(sequences)
            for position in range(old, old + new)
        ]
        return [
            _numbers(tokens, HEADS, SIZE, shift=0).to(dtype),
            _numbers(tokens, KV_HEADS, SIZE, shift=1).to(dtype),
            _numbers(tokens, KV_HEADS, SIZE, shift=2).to(dtype),
            _numbers(12, KV_HEADS, BLOCK, SIZE, shift=3).to(dtype),
            _numbers(12, KV_HEADS, BLOCK, SIZE, shift=4).to(dtype),
            torch.tensor(slots),
            table,
            torch.tensor([new for new, _ in sequences]).cumsum(0),
            torch.tensor([new + old for new, old in sequences]),
        ]

    return inputs


def _numbers(*sizes: int, shift: int) -> Tensor:
    """Return a tensor of distinct numbers from -1.5 to 1.5 that look random. Each ``shift`` gives other numbers."""
    count = torch.arange(1, torch.Size(sizes).numel() + 1, dtype=torch.float64) + 1000 * shift
    return ((count * 0.6180339887498949) % 1.0 * 3 - 1.5).view(sizes)


def _attention(decodes: bool) -> Callable[..., Tensor]:
    def function(q: Tensor, *inputs: Tensor) -> Tensor:
        *caches, table, ends, lengths = inputs
        out = torch.empty_like(q)
        sizes = (BLOCK, None if decodes else ends, lengths, 37, 68, HEADS, KV_HEADS)
        CACHED_ATTENTION(q, *caches, table, *sizes, out, SIZE**-0.5, -1, 0.0, None, None)
        return out

    return function


def _expected(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
    """Write keys and values to their slots one by one, and return the attention of each sequence in float64."""
    k_cache, v_cache, slots, table, ends, lengths = rest
    caches = [cache.clone() for cache in (k_cache, v_cache)]
    for token, slot in enumerate(slots.tolist()):
        for cache, new in zip(caches, (k, v), strict=True):
            cache[slot // BLOCK, :, slot % BLOCK] = new[token]
    outs, start = [], 0
    for row, end, length in zip(table, ends.tolist(), lengths.tolist(), strict=True):
        keys, values = (cache[row].transpose(1, 2).flatten(0, 1)[:length] for cache in caches)
        outs.append(attend(q[start:end], keys, values, Scoring(SIZE**-0.5)))
        start = end
    return [torch.cat(outs)]


def _paged(name: str, decodes: bool, sequences: tuple[tuple[int, int], ...]) -> TorchCase:
    return TorchCase(
        f"paged attention, {name}, blocks of {BLOCK}",
        [packet_name(CACHED_ATTENTION), packet_name(functional_op(CACHED_ATTENTION))],
        _attention(decodes),
        _step(sequences),
        _expected,
        TOLERANCE,
        skip_reason=foreign_layout,
    )


PAGED = [
    _paged("prefill", False, SEQUENCES),
    _paged("decoding", True, tuple((1, old) for _, old in SEQUENCES)),
]
