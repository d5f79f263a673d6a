"""What the C++ kernels of this vendor are asked before they are trusted.

They are made by a compiler for the CPU at hand, so that another CPU runs other instructions.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.graph.known_answers.answer import KnownAnswer, NotTakenError, name_of
from dlinfer.graph.known_answers.questions import FLOATS, ROUNDED, small_whole
from dlinfer.graph.known_answers.suite import KnownAnswers
from dlinfer.ops.packing import AWQ, MXFP4
from dlinfer.vendor.cpu import native

ROWS = (1, 2, 7, 40, 65, 130)
"""On both sides of each number of rows at which another kernel begins."""


def owner() -> str:
    """Whose answers these are, and of which version."""
    return f"torch {torch.__version__.partition('+')[0]} with dlinfer's C++ kernels"


def answers() -> Iterator[KnownAnswer]:
    """All that is asked."""
    for dtype in FLOATS:
        for bias in (False, True):
            yield _linear(dtype, bias)
        yield _packed_linear(dtype)
        yield _mxfp4_linear(dtype)
        if dtype != torch.float32:
            yield _norm(dtype)
        yield _decode(dtype)
        yield _fill(dtype)


def _native(name: str) -> Callable[..., Tensor]:
    if (reason := native.why_not()) is not None:
        raise NotTakenError(f"the C++ kernels cannot be built: {reason}")
    return getattr(torch.ops.dlinfer_cpu, name).default


def _linear(dtype: torch.dtype, biased: bool) -> KnownAnswer:
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
    return KnownAnswer(name, frozenset({"native linear", "native linears"}), name_of(dtype), run, expected)


def _packed_linear(dtype: torch.dtype) -> KnownAnswer:
    """Sums of at most 200 products of -1, 0 and 1 with numbers of -15 to 15: exact in float32, in any order."""
    packing = AWQ.of_groups(48)
    numbers, zeros = small_whole(200, 136, 1) * 7 + 8, small_whole(5, 136, 2) * 7 + 8
    qweight, qzeros = packing.pack(numbers.long()), packing.pack_zeros(zeros.long())
    scales, inputs = 2.0 ** small_whole(5, 136, 3), [small_whole(rows, 200, rows) for rows in ROWS]

    def run() -> Sequence[Tensor]:
        product = _native("weight_quant_matmul")
        return [product(x.to(dtype), qweight, scales.half(), qzeros, None, 48) for x in inputs]

    def expected() -> Sequence[Tensor]:
        weight = packing.dequantise(qweight, scales, qzeros)
        return [(x @ weight).to(dtype) for x in inputs]

    name = f"C++ linear with a weight of 4 bits, of {', '.join(map(str, ROWS))} rows"
    return KnownAnswer(name, frozenset({"native weight_quant_matmul"}), name_of(dtype), run, expected)


def _mxfp4_linear(dtype: torch.dtype) -> KnownAnswer:
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
    return KnownAnswer(name, frozenset({"native mxfp4_matmul"}), name_of(dtype), run, expected)


def _norm(dtype: torch.dtype) -> KnownAnswer:
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

    kinds = frozenset({"native rms_norm", "native add_rms_norm"})
    return KnownAnswer("C++ norms", kinds, name_of(dtype), run, expected, ROUNDED[dtype])


def _decode(dtype: torch.dtype) -> KnownAnswer:
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
    kinds = frozenset({"native paged_decode_attention"})
    return KnownAnswer(name, kinds, name_of(dtype), run, expected, ROUNDED[dtype])


def _fill(dtype: torch.dtype) -> KnownAnswer:
    """Six tokens of two heads, one of them padding, into pages of four slots."""
    keys, values = (small_whole(6, 2 * 24, shift).view(6, 2, 24).to(dtype) for shift in (1, 2))
    slots = torch.tensor([7, 0, -1, 11, 4, 6])

    def run() -> Sequence[Tensor]:
        caches = torch.zeros(2, 3, 4, 2, 24, dtype=dtype)
        _native("fill_kv_cache")(keys, values, *caches, slots)
        return list(caches)

    def expected() -> Sequence[Tensor]:
        caches = torch.zeros(2, 12, 2, 24, dtype=dtype)
        for cache, new in zip(caches, (keys, values), strict=True):
            cache[slots[slots >= 0]] = new[slots >= 0]
        return [cache.view(3, 4, 2, 24) for cache in caches]

    return KnownAnswer("C++ cache writes", frozenset({"native fill_kv_cache"}), name_of(dtype), run, expected)


KERNEL_ANSWERS = KnownAnswers(owner, answers, native.library_name)
