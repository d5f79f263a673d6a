"""Floating-point operations of products: as torch's own counter finds them, and by hand where it knows no op."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dlinfer import ops
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.flops import flops_of, share
from dlinfer.ops.quantised import bf12
from tests.graph.compiling import StubEngine, compiled, last_report, use_engine
from tests.graph.symbols import symbolic


def counted(function, *args) -> int:
    """Over all nodes of a function's graph."""
    fakes = symbolic(*args)
    graph = trace(lambda *given: (function(*given),), fakes, fakes[0].fake_mode).graph_module.graph
    return sum(flops_of(node) for node in graph.nodes if node.op == "call_function")


def random(*sizes):
    return torch.randn(sizes)


CASES = {
    "linear": (F.linear, random(3, 5, 8), random(6, 8), random(6)),
    "matmul": (torch.matmul, random(2, 3, 4), random(4, 5)),
    "bmm": (torch.bmm, random(2, 3, 4), random(2, 4, 5)),
    "addmm": (torch.addmm, random(5), random(3, 4), random(4, 5)),
    "baddbmm": (torch.baddbmm, random(5), random(2, 3, 4), random(2, 4, 5)),
    "conv1d": (F.conv1d, random(2, 4, 9), random(6, 4, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), random(2, 4, 9, 7), random(6, 4, 3, 3)),
    "transposed": (F.conv_transpose2d, random(2, 4, 5, 7), random(4, 6, 3, 3)),
    "attention": (F.scaled_dot_product_attention, random(2, 4, 5, 8), random(2, 4, 7, 8), random(2, 4, 7, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_as_torch_counts(case):
    function, *args = CASES[case]
    with FlopCounterMode(display=False) as counter:
        function(*args)
    assert counted(function, *args) == counter.get_total_flops()


def test_what_torch_does_not_count():
    assert (
        counted(lambda x, y: torch.einsum("bik,kj->bij", x, y), random(2, 3, 4), random(4, 5))
        == 2 * 2 * 3 * 4 * 5
    )
    assert counted(ops.linear, random(3, 8), random(6, 8)) == 2 * 3 * 8 * 6
    weights = [random(6, 8), random(4, 8)]
    assert (
        counted(lambda x, *w: ops.linears(x, list(w), [None, None])[0], random(3, 8), *weights)
        == 2 * 3 * 8 * 10
    )
    assert counted(lambda x: x.sin() @ x.t(), random(3, 8)) == 2 * 3 * 3 * 8
    assert counted(torch.sin, random(3, 8)) == 0


def test_grouped_products_count_each_row_once():
    rows, weights = random(16, 32).bfloat16(), random(4, 32, 8).bfloat16()
    ends = torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    assert (
        counted(lambda x, w, offs: torch._grouped_mm(x, w, offs=offs), rows, weights, ends) == 2 * 16 * 32 * 8
    )


def test_a_packed_weight_counts_as_its_numbers():
    qweight, scales = torch.zeros(16, 3, dtype=torch.int32), random(2, 24)

    def packed(x, qweight, scales):
        return ops.weight_quant_matmul(x, qweight, scales, group_size=8)

    assert counted(packed, random(5, 16), qweight, scales) == 2 * 5 * 16 * 24

    def in_12_bits(x, weight):
        return ops.linear_bf12(x, weight, out_features=24)

    assert counted(in_12_bits, random(5, 16), bf12.pack(random(24, 16).bfloat16())) == 2 * 5 * 16 * 24


def test_experts_count_what_is_chosen():
    x, gate_up, down = random(5, 8), random(4, 12, 8), random(4, 8, 6)
    weights, ids = random(5, 2), torch.randint(4, (5, 2))

    def moe(x, gate_up, down, weights, ids):
        return ops.fused_moe(x, gate_up, down, weights, ids, 2, True)

    assert counted(moe, x, gate_up, down, weights, ids) == 5 * 2 * (2 * 8 * 12 + 2 * 6 * 8)


def test_packed_experts_count_as_their_numbers():
    gate_up, gate_up_scales = torch.zeros(4, 16, 6, dtype=torch.int32), random(4, 2, 48)
    down, down_scales = torch.zeros(4, 24, 2, dtype=torch.int32), random(4, 3, 16)
    weights, ids = random(5, 2), torch.randint(4, (5, 2))

    def moe(x, gate_up, gate_up_scales, down, down_scales, weights, ids):
        parts = (gate_up, gate_up_scales, None, down, down_scales, None)
        return ops.fused_moe_w4a16(x, *parts, weights, ids, 2, True, 8)

    given = (random(5, 16), gate_up, gate_up_scales, down, down_scales, weights, ids)
    assert counted(moe, *given) == 5 * 2 * (2 * 16 * 48 + 2 * 24 * 16)


def test_experts_in_12_bits_count_as_their_numbers():
    gate_up, down = bf12.pack(random(4 * 12, 8).bfloat16()), bf12.pack(random(4 * 8, 6).bfloat16())
    weights, ids = random(5, 2), torch.randint(4, (5, 2))

    def moe(x, gate_up, down, weights, ids):
        return ops.fused_moe_bf12(x, gate_up, down, weights, ids, True, 4, 6)

    assert counted(moe, random(5, 8), gate_up, down, weights, ids) == 5 * 2 * (2 * 8 * 12 + 2 * 6 * 8)


def test_attention_over_pages_counts_the_longest_sequence():
    cache = random(6, 16, 2, 8)

    def decode(q, keys, values, table, lengths):
        return ops.paged_decode_attention(q, keys, values, table, 16, lengths, lengths, 40, 4, 2)

    table = torch.zeros(3, 3, dtype=torch.int64)
    lengths = torch.tensor([40, 7, 1])
    assert counted(decode, random(3, 4, 8), cache, cache.clone(), table, lengths) == 3 * 4 * 40 * 2 * (8 + 8)


@pytest.mark.usefixtures("graph_mode")
def test_a_report_tells_the_share_in_the_engine(monkeypatch):
    use_engine(monkeypatch, StubEngine(refused=["aten.mm"]))
    with torch.no_grad():
        compiled(lambda x, w: F.linear(x, w).sin() + torch.mm(x, w))(random(8, 8), random(8, 8))
    report = last_report()
    assert (report.flops("engine"), report.flops("eager")) == (2 * 8 * 8 * 8, 2 * 8 * 8 * 8)


def test_share():
    assert (share(3, 1), share(0, 5), share(0, 0)) == (0.75, 0.0, 1.0)
