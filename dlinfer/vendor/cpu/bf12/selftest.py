"""Self-test cases of the C++ kernels of packed bfloat16 matrices."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.graph.selftest.case import Case, dtype_name
from dlinfer.graph.selftest.torch_cases import ROUNDED, small_whole
from dlinfer.ops.quantised import bf12

_NARROW = torch.bfloat16
_KINDS = {f"native {name}" for name in ("linear_bf12", "linear_bf12_silu_and_mul", "embedding_bf12")}


def cases(native: Callable[[str], Callable[..., Tensor]], rows: Sequence[int]) -> Iterator[Case]:
    """native: returns a kernel by name. rows: of x, on both sides of each count at which another kernel takes over."""
    for columns in (256, 200):  # whole groups, and not
        yield _products(native, rows, columns)
    yield _experts(native)
    yield _packing(native)


def _products(native: Callable[[str], Callable[..., Tensor]], rows: Sequence[int], columns: int) -> Case:
    """Sums of products of -1, 0 and 1: exact in any order. Two rows are exceptions of the packing."""
    weight, gates = small_whole(70, columns, 1), small_whole(72, columns, 2) / 16
    weight[7] *= 2.0**-40
    weight[20] *= 2.0**40
    inputs, bias = [small_whole(count, columns, count) for count in rows], small_whole(1, 70, 3)[0]
    places = torch.tensor([[0, 7], [69, 20]])

    def run() -> Sequence[Tensor]:
        packed, halves = bf12.pack(weight.to(_NARROW)), bf12.pack(gates.to(_NARROW))
        linear, gated = native("linear_bf12"), native("linear_bf12_silu_and_mul")
        results = [linear(x.to(_NARROW), packed, bias.to(_NARROW), 70) for x in inputs]
        results += [gated(x.to(_NARROW), halves, None, 72) for x in inputs]
        return [*results, native("embedding_bf12")(places, packed, 70, columns)]

    def expected() -> Sequence[Tensor]:
        results = [F.linear(x.double(), weight.double(), bias.double()) for x in inputs]
        for x in inputs:
            gate, up = F.linear(x.double(), gates.double()).chunk(2, -1)
            results.append(F.silu(gate).to(_NARROW).double() * up)
        return [one.to(_NARROW) for one in (*results, weight[places])]

    name = f"C++ linear with a weight of 12 bits, of {columns} columns and {', '.join(map(str, rows))} rows"
    return Case(name, _KINDS, dtype_name(_NARROW), run, expected, ROUNDED[_NARROW])


def _experts(native: Callable[[str], Callable[..., Tensor]]) -> Case:
    """Five experts: one that nobody chooses, one of a single row, one of some, and two of many."""
    experts, hidden, inner, rows = 5, 72, 40, 300
    x = small_whole(rows, hidden, 1)
    gate_up = small_whole(experts * 2 * inner, hidden, 2) / 8
    down = small_whole(experts * hidden, inner, 3) / 8
    weights, ids = small_whole(rows, 2, 6) / 4 + 0.5, torch.tensor([[3, 1]]).repeat(rows, 1)
    ids[7, 1], ids[40:, 1] = 0, 4

    def run() -> Sequence[Tensor]:
        stacks = (bf12.pack(gate_up.to(_NARROW)), bf12.pack(down.to(_NARROW)))
        mixture = native("fused_moe_bf12")
        few = [
            mixture(x[:n].to(_NARROW), *stacks, weights[:n], ids[:n], False, experts, inner) for n in (1, 9)
        ]
        return [*few, mixture(x.to(_NARROW), *stacks, weights, ids, False, experts, inner)]

    def expected() -> Sequence[Tensor]:
        gate, up = (x.double() @ gate_up.double().view(experts, -1, hidden).mT).chunk(2, -1)
        results = (F.silu(gate) * up) @ down.double().view(experts, hidden, inner).mT
        shares = torch.zeros(rows, experts, dtype=torch.float64).scatter_add(1, ids, weights.double())
        whole = torch.einsum("re,erh->rh", shares, results).to(_NARROW)
        return [whole[:1], whole[:9], whole]

    name = "C++ experts with weights of 12 bits"
    return Case(name, {"native fused_moe_bf12"}, dtype_name(_NARROW), run, expected, ROUNDED[_NARROW])


def _packing(native: Callable[[str], Callable[..., Tensor]]) -> Case:
    """Every bfloat16 but those that differ in the sign alone, each as likely, so that most are exceptions."""
    weight = torch.arange(2**15).short().view(_NARROW)[: 127 * 258].view(127, 258)

    def run() -> Sequence[Tensor]:
        packed = native("pack_bf12")(weight)
        return [packed, native("unpack_bf12")(packed, *weight.shape).view(torch.int16)]

    def expected() -> Sequence[Tensor]:
        return [bf12.pack(weight), weight.view(torch.int16)]

    return Case(
        "C++ packing in 12 bits",
        {"native pack_bf12", "native unpack_bf12"},
        dtype_name(_NARROW),
        run,
        expected,
    )
