"""The self-test of this vendor's C++ kernels.

The compiler builds them for the CPU at hand, so another CPU runs other instructions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.graph.selftest.case import Case, NotSupportedError, dtype_name
from dlinfer.graph.selftest.suite import SelfTest
from dlinfer.graph.selftest.torch_cases import FLOATS, ROUNDED, small_whole
from dlinfer.ops.quantised.packing import AWQ, MXFP4
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.bf12 import selftest as bf12
from dlinfer.vendor.cpu.eight_bit import selftest as eight_bit

ROWS = (1, 2, 7, 40, 65, 130)
"""On both sides of each number of rows at which another kernel begins."""


def owner() -> str:
    """Name and version of what is tested."""
    return f"torch {torch.__version__.partition('+')[0]} with dlinfer's C++ kernels"


def cases() -> Iterator[Case]:
    """Every case."""
    yield from bf12.cases(_native, ROWS)
    yield from eight_bit.cases(_native, ROWS)
    for dtype in FLOATS:
        for bias in (False, True):
            yield _linear(dtype, bias)
        yield _packed_linear(dtype, rounds=False)
        yield _packed_linear(dtype, rounds=True)
        yield _mxfp4_linear(dtype)
        yield _norm(dtype)
        yield _decode(dtype)
        yield _router(dtype)
        yield _experts(dtype)
        yield _gated(dtype)
        yield _gated_sum(dtype)
        yield _rows_of_table(dtype)
        yield _rotary(dtype)
        yield _fill(dtype)
        yield _prefill(dtype)
        yield _masked(dtype)
        yield _copied(dtype)
        yield _tokens(dtype)


def _native(name: str) -> Callable[..., Tensor]:
    if (reason := native.why_not()) is not None:
        raise NotSupportedError(f"the C++ kernels cannot be built: {reason}")
    return getattr(torch.ops.dlinfer_cpu, name).default


def _linear(dtype: torch.dtype, biased: bool) -> Case:
    """Sums of at most 200 products of -1, 0 and 1: exact in every dtype, in any order."""
    weights = [small_whole(70, 200, 1), small_whole(33, 200, 2)]
    bias = small_whole(1, 70, 3)[0] if biased else None
    inputs = [small_whole(rows, 200, rows) for rows in ROWS]

    def run() -> Sequence[Tensor]:
        linear, linears = _native("linear"), _native("linears")
        given = None if bias is None else bias.to(dtype)
        narrow = [weight.to(dtype) for weight in weights]
        results = [linear(x.to(dtype), narrow[0], given) for x in inputs]
        return results + [one for x in inputs for one in linears(x.to(dtype), narrow, [given, None])]

    def expected() -> Sequence[Tensor]:
        results = [F.linear(x, weights[0], bias) for x in inputs]
        results += [one for x in inputs for one in (F.linear(x, weights[0], bias), F.linear(x, weights[1]))]
        return [one.to(dtype) for one in results]

    name = f"C++ linear of {', '.join(map(str, ROWS))} rows{', with bias' if biased else ''}"
    return Case(name, {"native linear", "native linears"}, dtype_name(dtype), run, expected)


def _packed_linear(dtype: torch.dtype, rounds: bool) -> Case:
    """Sums of at most 200 products of -1, 0 and 1 with numbers of -15 to 15: exact in float32, in any order.

    rounds: with a 127 in each group, by which each input is rounded to itself.
    """
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

    name = f"C++ linear with a weight of 4 bits, of {', '.join(str(len(x)) for x in inputs)} rows"
    return Case(name, {f"native {kernel}"}, dtype_name(dtype), run, expected)


def _mxfp4_linear(dtype: torch.dtype) -> Case:
    """Sums of at most 192 products of -1, 0 and 1 with halves of -6 to 6, by powers of two: exact in any order."""
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


def _norm(dtype: torch.dtype) -> Case:
    x, residual = (small_whole(5, 203, shift).add(0.5).to(dtype) for shift in (1, 2))
    weight = small_whole(1, 203, 3)[0].add(2).to(dtype)

    def run() -> Sequence[Tensor]:
        return [
            _native("rms_norm")(x, weight, 1e-6),
            *_native("add_rms_norm")(x, residual, weight, 1e-6),
        ]

    def expected() -> Sequence[Tensor]:
        total = x.double() + residual.double()
        values = [normed(x.double()), normed(total), total]
        return [one.to(dtype) for one in values]

    def normed(value: Tensor) -> Tensor:
        return value * (value.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()

    return Case(
        "C++ norms",
        {"native rms_norm", "native add_rms_norm"},
        dtype_name(dtype),
        run,
        expected,
        ROUNDED[dtype],
    )


def _decode(dtype: torch.dtype) -> Case:
    """One sequence of 300 keys in pages of 16, three heads to a key head."""
    keys, values = (small_whole(320, 2 * 40, shift).view(20, 16, 2, 40) for shift in (1, 2))
    q, pages = small_whole(6, 40, 3).view(1, 6, 40), torch.arange(19, -1, -1)[None]

    def run() -> Sequence[Tensor]:
        out = torch.empty(1, 6, 40, dtype=dtype)
        given = (one.to(dtype) for one in (q, keys, values))
        length = torch.tensor([300])
        _native("paged_decode_attention")(*given, pages, length, out, 0.25, 200, 0.0, None, None)
        return [out]

    def expected() -> Sequence[Tensor]:
        k, v = (one.flip(0).reshape(320, 2, 40)[99:300].transpose(0, 1) for one in (keys, values))
        weights = (q.view(2, 3, 40) @ k.mT * 0.25).softmax(-1)
        return [(weights @ v).view(1, 6, 40).to(dtype)]

    name = "C++ decode attention"
    return Case(name, {"native paged_decode_attention"}, dtype_name(dtype), run, expected, ROUNDED[dtype])


def _router(dtype: torch.dtype) -> Case:
    """Of logits that halve the probability each time, in an order of their own in each row, and of equal ones."""
    order = (torch.arange(37) * torch.tensor([[5], [7], [36]]) + 3) % 37
    logits = torch.cat([(-order * math.log(2)).to(dtype), torch.zeros(1, 37, dtype=dtype)])

    def run() -> Sequence[Tensor]:
        gating = _native("moe_gating_topk_softmax")
        return [*gating(logits, 5, -1), *gating(logits[:, :36], 4, 2)]

    def expected() -> Sequence[Tensor]:
        return [*chosen(logits, 5, 1), *chosen(logits[:, :36], 2, 2)]

    def chosen(given: Tensor, count: int, groups: int) -> tuple[Tensor, Tensor]:
        parts = given.double().softmax(-1).chunk(groups, -1)
        places = [part.sort(dim=-1, descending=True, stable=True).indices[:, :count] for part in parts]
        size = given.shape[1] // groups
        weights = torch.cat([part.gather(1, ids) for part, ids in zip(parts, places, strict=True)], -1)
        return weights.float(), torch.cat([ids + size * g for g, ids in enumerate(places)], -1)

    return Case(
        "C++ router",
        {"native moe_gating_topk_softmax"},
        dtype_name(dtype),
        run,
        expected,
        ROUNDED[torch.float32],
    )


def _experts(dtype: torch.dtype) -> Case:
    """Five experts, one of which nobody chooses; of the others one gets a row, one some and two many."""
    hidden, experts, rows = 72, 5, 300
    x = small_whole(rows, hidden, 1)
    gate_up = small_whole(experts * 2 * 40, hidden, 2).view(experts, 80, hidden) / 8
    down = small_whole(experts * hidden, 40, 3).view(experts, hidden, 40) / 8
    gate_up_bias, down_bias = small_whole(experts, 80, 4), small_whole(experts, hidden, 5)
    weights = small_whole(rows, 2, 6) / 4 + 0.5
    ids = torch.tensor([[3, 1]]).repeat(rows, 1)
    ids[7, 1], ids[40:, 1] = 0, 4

    def run() -> Sequence[Tensor]:
        given = [one.to(dtype) for one in (x, gate_up, gate_up_bias, down, down_bias)]
        plain = _native("fused_moe")(given[0], given[1], given[3], weights, ids, False)
        return [plain, _native("fused_moe_clamped")(*given, weights, ids, 1.5, 2.0)]

    def expected() -> Sequence[Tensor]:
        return [mixture(silu).to(dtype), mixture(clamped, gate_up_bias, down_bias).to(dtype)]

    def mixture(activated: Callable[[Tensor], Tensor], *biases: Tensor) -> Tensor:
        """Every expert of every row, of which the weights then take those that were chosen."""
        inner, outer = (one.double().unsqueeze(1) for one in biases) if biases else (0.0, 0.0)
        results = activated(x.double() @ gate_up.double().mT + inner) @ down.double().mT + outer
        shares = torch.zeros(rows, experts, dtype=torch.float64).scatter_add(1, ids, weights.double())
        return torch.einsum("re,erh->rh", shares, results)

    def silu(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate * gate.sigmoid() * up

    def clamped(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=2), up.clamp(-2, 2)
        return (up + 1) * gate * (1.5 * gate).sigmoid()

    return Case(
        "C++ experts",
        {"native fused_moe", "native fused_moe_clamped"},
        dtype_name(dtype),
        run,
        expected,
        ROUNDED[dtype],
    )


def _gated(dtype: torch.dtype) -> Case:
    gate, up = (small_whole(3, 203, shift).mul(3).add(0.5).to(dtype) for shift in (1, 2))
    weight = torch.cat([gate.T, up.T]).contiguous()  # [406, 3]

    def run() -> Sequence[Tensor]:
        both = _native("silu_and_mul")(torch.cat([gate, up], -1))
        apart = [_native(f"{name}_mul")(gate, up) for name in ("silu", "gelu")]
        return [both, *apart, _native("linear_silu_and_mul")(torch.eye(3).to(dtype), weight)]

    def expected() -> Sequence[Tensor]:
        wide = gate.double()
        silu, gelu = wide * wide.sigmoid(), F.gelu(wide, approximate="tanh")
        return [(one * up.double()).to(dtype) for one in (silu, silu, gelu, silu)]

    names = ("silu_and_mul", "silu_mul", "gelu_mul", "linear_silu_and_mul")
    return Case(
        "C++ gated activations",
        {f"native {name}" for name in names},
        dtype_name(dtype),
        run,
        expected,
        ROUNDED[dtype],
    )


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
        return [_native("embedding")(table, one) for one in (places, places.int())]

    def expected() -> Sequence[Tensor]:
        return [torch.stack([torch.stack([table[row] for row in rows]) for rows in places.tolist()])] * 2

    return Case("C++ rows of a table", {"native embedding"}, dtype_name(dtype), run, expected, 0.0)


def _rotary(dtype: torch.dtype) -> Case:
    """Of whole numbers, so that nothing is rounded."""
    q, k = (small_whole(3 * heads, 106, heads).view(3, heads, 106) for heads in (4, 2))
    cos, sin = small_whole(3, 106, 5), small_whole(3, 106, 6)

    def run() -> Sequence[Tensor]:
        return [*_native("apply_rotary_pos_emb")(*(one.to(dtype) for one in (q, k, cos, sin)))]

    def expected() -> Sequence[Tensor]:
        return [rotated(one).to(dtype) for one in (q, k)]

    def rotated(x: Tensor) -> Tensor:
        turned = torch.cat((-x[..., 53:], x[..., :53]), -1)
        return x * cos[:, None] + turned * sin[:, None]

    return Case("C++ rotation", {"native apply_rotary_pos_emb"}, dtype_name(dtype), run, expected)


def _fill(dtype: torch.dtype) -> Case:
    k, v = (small_whole(5, 2 * 20, shift).view(5, 2, 20).to(dtype) for shift in (1, 2))
    slots = [9, -1, 0, 15, 4]

    def run() -> Sequence[Tensor]:
        caches = [torch.zeros(4, 4, 2, 20, dtype=dtype) for _ in range(2)]
        _native("fill_kv_cache")(k, v, *caches, torch.tensor(slots))
        return caches

    def expected() -> Sequence[Tensor]:
        caches = torch.zeros(2, 16, 2, 20, dtype=dtype)
        for token, slot in enumerate(slots):
            if slot >= 0:
                caches[0, slot], caches[1, slot] = k[token], v[token]
        return list(caches.view(2, 4, 4, 2, 20))

    return Case("C++ fill of the cache", {"native fill_kv_cache"}, dtype_name(dtype), run, expected)


def _prefill(dtype: torch.dtype) -> Case:
    """Two sequences, of 150 queries on as many keys and of 70 on the last of 200, three heads to a key head.

    Once packed, and once in pages of 16 that stand in reverse.
    """
    queries = small_whole(220, 6 * 40, 3).view(220, 6, 40).split([150, 70])
    keys = small_whole(350, 2 * 40, 1).view(350, 2, 40).split([150, 200])
    values = small_whole(350, 2 * 36, 2).view(350, 2, 36).split([150, 200])
    ends, lengths = torch.tensor([150, 220]), torch.tensor([150, 200])
    table = torch.stack([torch.arange(22, 9, -1), torch.arange(12, -1, -1)])  # of 10 pages and of 13

    def run() -> Sequence[Tensor]:
        q, k, v = (torch.cat(one).to(dtype) for one in (queries, keys, values))
        out = torch.empty(2, 220, 6, 36, dtype=dtype)
        rules = (0.25, True, 120, -1, 0.0, None, None)
        _native("prefill_attention")(q, k, v, ends, lengths, out[0], *rules)
        caches = [_pages(one).to(dtype) for one in (keys, values)]
        _native("paged_prefill_attention")(q, *caches, table, ends, lengths, out[1], *rules)
        return list(out)

    def expected() -> Sequence[Tensor]:
        results = []
        for q, k, v in zip(queries, keys, values, strict=True):
            age = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
            scores = torch.einsum("qhgd,khd->hgqk", q.view(-1, 2, 3, 40), k) * 0.25
            weights = scores.masked_fill((age < 0) | (age > 120), -torch.inf).softmax(-1)
            results.append(torch.einsum("hgqk,khd->qhgd", weights, v).reshape(-1, 6, 36).to(dtype))
        return [torch.cat(results)] * 2

    return Case(
        "C++ prefill attention",
        {"native prefill_attention", "native paged_prefill_attention"},
        dtype_name(dtype),
        run,
        expected,
        ROUNDED[dtype],
    )


def _masked(dtype: torch.dtype) -> Case:
    """Two sequences of 300 keys, three heads to a key head: 70 queries on ranges of them, and one."""
    q, k, v = (
        small_whole(2 * heads * rows, 40, rows).view(2, heads, rows, 40)
        for heads, rows in ((6, 70), (2, 300), (2, 301))
    )
    v, at = v[:, :, 1:], torch.arange(300)
    begin = torch.arange(70)[:, None] * 3
    seen = (at >= begin) & (at < begin + 60)

    def run() -> Sequence[Tensor]:
        op, given = _native("scaled_dot_product_attention"), [one.to(dtype) for one in (q, k, v)]
        bias = torch.zeros(70, 300, dtype=dtype).masked_fill(~seen, -math.inf)
        rules: dict[str, Any] = {"scale": 0.25, "enable_gqa": True}
        return [
            op(*given, seen, **rules),
            op(*given, bias, **rules),
            op(given[0][:, :, -1:], *given[1:], seen[-1:], **rules),
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


def _pages(sequences: Sequence[Tensor]) -> Tensor:
    """Keys of each sequence in pages of 16, the last one first."""
    padded = [F.pad(one, (0, 0, 0, 0, 0, -len(one) % 16)) for one in sequences]
    return torch.cat(padded).unflatten(0, (-1, 16)).flip(0)


def _tokens(dtype: torch.dtype) -> Case:
    """Of equal logits, whose order is that of the tokens, and of logits that halve the probability each time."""
    equal = torch.zeros(4, 5000)
    equal[:, 1::2] = -torch.inf
    halving = -torch.arange(1000).flip(0).repeat(4, 1) * math.log(2)
    numbers = torch.tensor([0.1001, 0.4001, 0.6001, 0.9001])
    limits = torch.full((4,), 3), torch.full((4,), 0.6), torch.full((4,), 0.2)

    def run() -> Sequence[Tensor]:
        largest, drawn = _native("largest_tokens"), _native("drawn_tokens")
        given = [one.to(dtype) for one in (equal, halving)]
        results = [largest(one) for one in given] + [drawn(one, numbers) for one in given]
        return results + [drawn(given[1], numbers, *(one if k == i else None for k, one in enumerate(limits)))
                          for i in range(3)]  # fmt: skip

    def expected() -> Sequence[Tensor]:
        # Of 2500 equal ones; of 1/2, 1/4, 1/8 ...; of 4/7, 2/7, 1/7; of 2/3, 1/3; and again of the former three.
        tokens = [[0] * 4, [999] * 4, [500, 2000, 3000, 4500], [999, 999, 998, 996], [999, 999, 998, 997],
                  [999, 999, 999, 998], [999, 999, 998, 997]]  # fmt: skip
        return [torch.tensor(one) for one in tokens]

    return Case(
        "C++ next tokens", {"native largest_tokens", "native drawn_tokens"}, dtype_name(dtype), run, expected
    )


KERNEL_SELFTEST = SelfTest(owner, cases, native.library_name)
