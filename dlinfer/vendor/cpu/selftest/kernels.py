"""The self-test of this vendor's C++ kernels.

They are compiled for the CPU at hand, so tests on another CPU do not show that they are right here.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.graph.selftest.case import Case, NotSupportedError, dtype_name
from dlinfer.graph.selftest.suite import SelfTest
from dlinfer.graph.selftest.torch_cases import FLOATS, ROUNDED, small_whole
from dlinfer.ops import registry
from dlinfer.ops.attention.kv_cache import kv_order
from dlinfer.ops.core import oracle
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised.packing import AWQ, MXFP4
from dlinfer.vendor import KVCacheLayout, discovery
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.selftest import bf12, eight_bit
from dlinfer.vendor.cpu.selftest.samples import LARGER, ROWS

_OPS: dict[str, Collection[str]] = {
    **{
        op: (op,)
        for op in (
            "linear", "linears", "rms_norm", "add_rms_norm", "silu_and_mul", "silu_mul", "gelu_mul",
            "apply_rotary_pos_emb", "fill_kv_cache", "prefill_attention", "paged_prefill_attention",
            "paged_decode_attention", "moe_gating_topk_softmax", "fused_moe", "fused_moe_clamped",
            "linear_w8a8", "linear_gguf", "embedding_gguf",
        )
    },
    "linear_blocked_fp8": ("linear_fp8", "rounded_in_blocks"),
}  # fmt: skip
"""Op -> its C++ kernels, for the ops whose kernels take any dtype."""

_BF12_OPS = ("linear_bf12", "embedding_bf12", "fused_moe_bf12")
"""Ops whose C++ kernels take bfloat16 only."""


def owner() -> str:
    return f"torch {torch.__version__.partition('+')[0]} with dlinfer's C++ kernels"


def cases() -> Iterator[Case]:
    yield from bf12.cases(_native)
    yield from eight_bit.cases(_native)
    for dtype in FLOATS:
        for op, kernels in _OPS.items():
            yield _op(op, kernels, dtype)
        yield _packed_linear(dtype, rounds=False)
        yield _packed_linear(dtype, rounds=True)
        yield _mxfp4_linear(dtype)
        yield _gated_linear(dtype)
        yield _gated_sum(dtype)
        yield _rows_of_table(dtype)
        yield _masked(dtype)
        yield _copied(dtype)
        yield _summed(dtype)
        yield _tokens(dtype)
    for op in _BF12_OPS:
        yield _op(op, (op,), torch.bfloat16)


def _native(name: str) -> Callable[..., Tensor]:
    if (reason := native.why_not()) is not None:
        raise NotSupportedError(f"the C++ kernels cannot be built: {reason}")
    return getattr(torch.ops.dlinfer_cpu, name).default


def _op(op: str, kernels: Collection[str], dtype: torch.dtype) -> Case:
    """Return a case that compares an op's kernel with its float64 reference, on the op's samples and larger ones."""
    spec = registry()[op]

    def calls(layout: KVCacheLayout) -> Iterator[list[Any]]:
        make = SampleMaker(dtype, layout=layout)
        yield from (list(sample.args) for sample in spec.sample_inputs(make))
        yield from map(list, LARGER[op](make) if op in LARGER else ())

    def run() -> Sequence[Tensor]:
        # Found by name, because the kernels import what imports this file.
        kernel = discovery.kernels_of(discovery.get("cpu"))[op]
        for name in kernels:
            _native(name)
        results = [
            result for args in calls(KVCacheLayout()) for result in oracle.results(spec, args, kernel(*args))
        ]
        return [oracle.widened(result) for result in results]

    def expected() -> Sequence[Tensor]:
        # The reference reads caches in the layout of the active vendor, which may not be this one.
        layout = KVCacheLayout(kv_order("cpu"))
        results = [result for args in calls(layout) for result in oracle.expected(spec, args)]
        writes_caches = "k_cache" in spec.mutates
        return [oracle.widened(layout.canonical(result) if writes_caches else result) for result in results]

    within = spec.tolerances[dtype]
    covers = {f"native {name}" for name in kernels}
    return Case(f"C++ {op}", covers, dtype_name(dtype), run, expected, max(within.rtol, within.atol))


def _packed_linear(dtype: torch.dtype, rounds: bool) -> Case:
    """Return a case of products with a 4-bit weight, whose sums are exact in any order.

    Each result is a sum of at most 200 products. A product is -1, 0 or 1 times an integer from -15 to 15, times a power
    of two.
    rounds: test the kernel that rounds inputs to int8. Each group of inputs then has a 127, so that the group's scale
        is 1."""
    packing = AWQ.of_groups(48)
    numbers, zeros = small_whole(200, 136, 1) * 7 + 8, small_whole(5, 136, 2) * 7 + 8
    qweight, qzeros = packing.pack(numbers.long()), packing.pack_zeros(zeros.long())
    scales, inputs = 2.0 ** small_whole(5, 136, 3), [small_whole(rows, 200, rows) for rows in ROWS]
    kernel = "weight_quant_matmul"
    if rounds:
        kernel = "weight_quant_matmul_int8"
        for x in inputs:
            x[:, ::48] = 127

    def run() -> Sequence[Tensor]:
        product = _native(kernel)
        return [product(x.to(dtype), qweight, scales.half(), qzeros, None, 48) for x in inputs]

    def expected() -> Sequence[Tensor]:
        weight = packing.dequantise(qweight, scales, qzeros)
        return [(x @ weight).to(dtype) for x in inputs]

    rows = f"{', '.join(map(str, ROWS))}{' rounded' if rounds else ''} rows"
    name = f"C++ linear with a weight of 4 bits, of {rows}"
    return Case(name, {f"native {kernel}"}, dtype_name(dtype), run, expected)


def _mxfp4_linear(dtype: torch.dtype) -> Case:
    """Return a case of products with an mxfp4 weight, whose sums are exact in any order.

    Each result is a sum of at most 192 products. A product is -1, 0 or 1 times a multiple of 0.5 from -6 to 6, times a
    power of two."""
    generator = torch.Generator().manual_seed(0)
    qweight = torch.randint(-(2**31), 2**31, (192, 17), generator=generator).to(MXFP4.storage)
    scales, inputs = 2.0 ** small_whole(6, 136, 3), [small_whole(rows, 192, rows) for rows in ROWS]

    def run() -> Sequence[Tensor]:
        product = _native("mxfp4_matmul")
        return [product(x.to(dtype), qweight, scales.bfloat16(), MXFP4.group_size) for x in inputs]

    def expected() -> Sequence[Tensor]:
        weight = MXFP4.dequantise(qweight, scales, None)
        return [(x @ weight).to(dtype) for x in inputs]

    name = f"C++ linear with a weight of floats of 4 bits, of {', '.join(map(str, ROWS))} rows"
    return Case(name, {"native mxfp4_matmul"}, dtype_name(dtype), run, expected)


def _gated_linear(dtype: torch.dtype) -> Case:
    gate, up = (small_whole(3, 203, shift).mul(3).add(0.5).to(dtype) for shift in (1, 2))
    weight = torch.cat([gate.T, up.T]).contiguous()  # [406, 3]

    def run() -> Sequence[Tensor]:
        return [_native("linear_silu_and_mul")(torch.eye(3).to(dtype), weight)]

    def expected() -> Sequence[Tensor]:
        return [(F.silu(gate.double()) * up.double()).to(dtype)]

    covers = {"native linear_silu_and_mul"}
    return Case("C++ gated linear", covers, dtype_name(dtype), run, expected, ROUNDED[dtype])


def _gated_sum(dtype: torch.dtype) -> Case:
    x, y = (small_whole(3, 203, shift).mul(3).add(0.5).to(dtype) for shift in (1, 2))
    gate = torch.tensor([[-2.0], [0.0], [1.5]]).to(dtype)

    def run() -> Sequence[Tensor]:
        return [_native("gated_sum")(x, gate, y)]

    def expected() -> Sequence[Tensor]:
        return [(x.double() + gate.double().sigmoid() * y.double()).to(dtype)]

    return Case("C++ sum with a gate", {"native gated_sum"}, dtype_name(dtype), run, expected, ROUNDED[dtype])


def _rows_of_table(dtype: torch.dtype) -> Case:
    table = small_whole(9, 41, 1).to(dtype)
    places = torch.tensor([[8, 0, 3], [3, 1, 8]])

    def run() -> Sequence[Tensor]:
        return [_native("embedding")(table, tensor) for tensor in (places, places.int())]

    def expected() -> Sequence[Tensor]:
        return [torch.stack([torch.stack([table[row] for row in rows]) for rows in places.tolist()])] * 2

    return Case("C++ rows of a table", {"native embedding"}, dtype_name(dtype), run, expected, 0.0)


def _masked(dtype: torch.dtype) -> Case:
    """Return a case of attention under a mask: query i of 70 sees keys 3i to 3i + 59 of 300.

    The kernel gets the mask as bools, then as numbers to add. In a third call it gets only the last query. There are
    two sequences, and three query heads for each key head."""
    q, k, v = (
        small_whole(2 * heads * rows, 40, rows).view(2, heads, rows, 40)
        for heads, rows in ((6, 70), (2, 300), (2, 301))
    )
    v, at = v[:, :, 1:], torch.arange(300)
    begin = torch.arange(70)[:, None] * 3
    seen = (at >= begin) & (at < begin + 60)

    def run() -> Sequence[Tensor]:
        op, narrow = _native("scaled_dot_product_attention"), [tensor.to(dtype) for tensor in (q, k, v)]
        bias = torch.zeros(70, 300, dtype=dtype).masked_fill(~seen, -math.inf)
        rules: dict[str, Any] = {"scale": 0.25, "enable_gqa": True}
        return [
            op(*narrow, seen, **rules),
            op(*narrow, bias, **rules),
            op(narrow[0][:, :, -1:], *narrow[1:], seen[-1:], **rules),
        ]

    def expected() -> Sequence[Tensor]:
        scores = q @ k.repeat_interleave(3, 1).mT * 0.25
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out = (weights @ v.repeat_interleave(3, 1)).to(dtype)
        return [out, out, out[:, :, -1:]]

    return Case(
        "C++ attention under a mask",
        {"native scaled_dot_product_attention"},
        dtype_name(dtype),
        run,
        expected,
        ROUNDED[dtype],
    )


def _copied(dtype: torch.dtype) -> Case:
    rows, places = small_whole(6, 20, 1).view(2, 3, 20).to(dtype), [4, 0, 3]

    def run() -> Sequence[Tensor]:
        return [_native("index_copy_")(torch.zeros(2, 5, 20, dtype=dtype), 1, torch.tensor(places), rows)]

    def expected() -> Sequence[Tensor]:
        filled = torch.zeros(2, 5, 20, dtype=dtype)
        for row, place in enumerate(places):
            filled[:, place] = rows[:, row]
        return [filled]

    return Case("C++ copies of rows", {"native index_copy_"}, dtype_name(dtype), run, expected)


def _summed(dtype: torch.dtype) -> Case:
    """Return a case that sums whole numbers of two ranks, which are two threads here. The sums are exact."""
    parts = [small_whole(3, 203, shift).to(dtype) for shift in (1, 2)]

    def run() -> Sequence[Tensor]:
        sum_up = _native("all_reduce")
        if not hasattr(os, "memfd_create"):
            raise NotSupportedError("no anonymous files")
        groups, results = [-2, -3], [part.clone() for part in parts]
        file = os.memfd_create("dlinfer_selftest")
        try:
            os.ftruncate(file, torch.ops.dlinfer_cpu.shared_bytes.default(2))
            for rank, group in enumerate(groups):
                torch.ops.dlinfer_cpu.open_group.default(group, file, rank, [os.getpid()] * 2, 0)
            with ThreadPoolExecutor(1) as other_rank:
                other = other_rank.submit(sum_up, results[1], groups[1])
                sum_up(results[0], groups[0])
                other.result()
            for group in groups:
                torch.ops.dlinfer_cpu.close_group.default(group)
        finally:
            os.close(file)
        return results

    def expected() -> Sequence[Tensor]:
        return [parts[0] + parts[1]] * 2

    return Case("C++ sum over ranks", {"native all_reduce"}, dtype_name(dtype), run, expected, 0.0)


def _tokens(dtype: torch.dtype) -> Case:
    """Return a case of two kernels: one takes the token with the largest logit, the other draws a token.

    In one input 2500 tokens have the same logit, the largest. The first kernel must take the lowest of these tokens.
    The second must add up their probabilities in their order. In the other input each token is half as probable as the
    next one. From this input tokens are also drawn under a limit: top-k, top-p or min-p.
    """
    equal = torch.zeros(4, 5000)
    equal[:, 1::2] = -torch.inf
    halving = -torch.arange(1000).flip(0).repeat(4, 1) * math.log(2)
    numbers = torch.tensor([0.1001, 0.4001, 0.6001, 0.9001])
    limits = torch.full((4,), 3), torch.full((4,), 0.6), torch.full((4,), 0.2)

    def run() -> Sequence[Tensor]:
        largest, drawn = _native("largest_tokens"), _native("drawn_tokens")
        narrow = [tensor.to(dtype) for tensor in (equal, halving)]
        results = [largest(tensor) for tensor in narrow] + [drawn(tensor, numbers) for tensor in narrow]
        return results + [drawn(narrow[1], numbers, *(tensor if k == i else None for k, tensor in enumerate(limits)))
                          for i in range(3)]  # fmt: skip

    def expected() -> Sequence[Tensor]:
        # 2500 equal logits; 1/2, 1/4, 1/8 ...; 4/7, 2/7, 1/7; 2/3, 1/3; and again 4/7, 2/7, 1/7.
        tokens = [[0] * 4, [999] * 4, [500, 2000, 3000, 4500], [999, 999, 998, 996], [999, 999, 998, 997],
                  [999, 999, 999, 998], [999, 999, 998, 997]]  # fmt: skip
        return [torch.tensor(tensor) for tensor in tokens]

    return Case(
        "C++ next tokens", {"native largest_tokens", "native drawn_tokens"}, dtype_name(dtype), run, expected
    )


KERNEL_SELFTEST = SelfTest(owner, cases, native.library_name)
