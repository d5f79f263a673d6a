"""Self-test cases of the C++ kernels of packed bfloat16 matrices."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.graph.selftest.case import Case, dtype_name
from dlinfer.graph.selftest.torch_cases import ROUNDED, small_whole
from dlinfer.ops.quantised import bf12
from dlinfer.vendor.cpu.selftest.samples import ROWS

_NARROW = torch.bfloat16


def cases(native: Callable[[str], Callable[..., Tensor]]) -> Iterator[Case]:
    """Yield the cases. native: takes a kernel's name and returns the kernel."""
    for columns in (256, 200):  # whole groups, and a part of one
        yield _gated(native, columns)
    yield _packing(native)


def _gated(native: Callable[[str], Callable[..., Tensor]], columns: int) -> Case:
    """Return a case of a gated linear layer with packed weights, whose sums are exact in any order.

    The inputs are -1, 0 and 1. The weights are these numbers divided by 16.
    """
    gates, inputs = small_whole(72, columns, 2) / 16, [small_whole(rows, columns, rows) for rows in ROWS]

    def run() -> Sequence[Tensor]:
        packed, gated = bf12.pack(gates.to(_NARROW)), native("linear_bf12_silu_and_mul")
        return [gated(x.to(_NARROW), packed, None, 72) for x in inputs]

    def expected() -> Sequence[Tensor]:
        halves = [F.linear(x.double(), gates.double()).chunk(2, -1) for x in inputs]
        return [(F.silu(gate).to(_NARROW).double() * up).to(_NARROW) for gate, up in halves]

    name = f"C++ gated linear with a weight of 12 bits, of {columns} columns"
    covers = {"native linear_bf12_silu_and_mul"}
    return Case(name, covers, dtype_name(_NARROW), run, expected, ROUNDED[_NARROW])


def _packing(native: Callable[[str], Callable[..., Tensor]]) -> Case:
    """Return a case that packs nearly every positive bfloat16 number once. Most of them do not fit into 12 bits."""
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
