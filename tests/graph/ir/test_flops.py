"""Floating-point operations of products: as torch's own counter finds them, and by hand where it knows no op."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from dlinfer import ops
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.ir.flops import _COUNTS, flops_of, share
from dlinfer.graph.torch_private.fake_mode import fresh_mode
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.core.spec import registry
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


def test_weights_in_ggufs_blocks_count_as_their_numbers():
    def linear(x, weight):
        return ops.linear_gguf(x, weight, types=[8, 2], rows=[24, 8])

    weight = torch.zeros(24 * 34 + 8 * 18, dtype=torch.uint8)
    assert counted(linear, random(5, 32), weight) == 2 * 5 * 32 * 32

    def moe(x, gate_up, down, weights, ids):
        return ops.fused_moe_gguf(x, gate_up, down, weights, ids, True, 32, [8, 8], 8)

    gate_up, down = (torch.zeros(4, count * 34, dtype=torch.uint8) for count in (64, 32))
    weights, ids = random(5, 2), torch.randint(4, (5, 2))
    assert counted(moe, random(5, 32), gate_up, down, weights, ids) == 5 * 2 * 2 * 3 * 32 * 32


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


NO_PRODUCT = {
    *("silu_mul", "gelu_mul", "silu_and_mul"),
    *("fill_kv_cache", "fill_quantised_kv_cache", "compress_windows", "sinkhorn"),
    *("rms_norm", "add_rms_norm", "rms_norm_w8a8", "add_rms_norm_w8a8", "dynamic_quant"),
    *("moe_gating_topk_softmax", "embedding_bf12", "embedding_gguf", "all_reduce"),
    *("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleaved"),
}


def test_every_op_is_a_product_or_known_to_be_none():
    products = {name.removeprefix("dlinfer::") for name in _COUNTS if name.startswith("dlinfer::")}
    assert not products & NO_PRODUCT
    assert products | NO_PRODUCT == set(registry())


def linear(call) -> int:
    return 2 * call.get("x", call.get("a")).numel() * call.get("weight", call.get("b")).shape[0]


def experts(call) -> int:
    return 2 * call["topk_ids"].numel() * 3 * call["down_weights"][0].numel()


def indexer(call) -> int:
    return 2 * call["query"].numel() * call["block_table"].shape[1] * 8  # slots in a block of the samples


def sparse_attention(call) -> int:
    numbers = [call[name].shape[-1] for name in ("query", "query_rope", "value")]
    tokens, heads, _ = call["query"].shape
    return 2 * tokens * heads * call["sparse_indices"].shape[2] * sum(numbers)


def compressed_indexer(call) -> int:
    return indexer(call) // 2  # 4 slots in a block


def compressed_attention(call) -> int:
    keys = call["window_state"].shape[1]
    if call["chosen"] is not None:
        keys += call["chosen"].shape[2]
    elif call["compressed"] is not None:
        keys += call["block_table"].shape[1] * 4
    return 2 * 2 * call["query"].numel() * keys


def delta_rule(call) -> int:
    tokens = call["value"].shape[0]
    return 3 * 2 * tokens * math.prod(call["recurrent_state"].shape[-3:])


def convolution(call) -> int:
    return 2 * call["x"].shape[0] * call["weight"].numel()


def lora(call) -> int:
    mean_rank = call["a"].shape[0] / max(call["ranks"].numel(), 1)
    return int(2 * (call["x"].numel() + call["base"].numel()) * mean_rank)


SAMPLED = {
    **dict.fromkeys(("linear_w8a8", "linear_w8a8_static", "linear_blocked_fp8", "linear_static_fp8"), linear),
    **dict.fromkeys(
        [f"fused_moe_{kind}" for kind in "w8a8 static_fp8 blocked_fp8 clamped limited".split()], experts
    ),
    "lightning_indexer": indexer,
    "compressed_indexer": compressed_indexer,
    "compressed_attention": compressed_attention,
    "sparse_flash_attention": sparse_attention,
    "gated_delta_rule": delta_rule,
    "causal_conv1d": convolution,
    "lora_linear": lora,
}


@pytest.mark.parametrize("name", SAMPLED)
def test_an_op_counts_as_its_sizes_say(name):
    op = registry()[name]
    for sample in op.sample_inputs(SampleMaker(torch.float32)):
        expected = SAMPLED[name](dict(zip(op.parameters, sample.args, strict=True)))
        assert counted_call(op.overload, sample.args) == expected, sample.name


def counted_call(overload, args) -> int:
    """Over the one node of a graph that calls an op on fakes of a sample."""
    graph, mode = fx.Graph(), fresh_mode()
    values, spec = tree_flatten(list(args))
    nodes = []
    for place, value in enumerate(values):
        nodes.append(graph.placeholder(f"x{place}") if isinstance(value, torch.Tensor) else value)
        if isinstance(value, torch.Tensor):
            nodes[-1].meta["val"] = mode.from_tensor(value)
    node = graph.call_function(overload, tuple(tree_unflatten(nodes, spec)))
    with mode:
        node.meta["val"] = overload(*map_arg(node.args, fake))
    return flops_of(node)


@pytest.mark.usefixtures("graph_mode")
def test_a_report_tells_the_share_in_the_engine(monkeypatch):
    use_engine(monkeypatch, StubEngine(refused=["aten.mm"]))
    with torch.no_grad():
        compiled(lambda x, w: F.linear(x, w).sin() + torch.mm(x, w))(random(8, 8), random(8, 8))
    report = last_report()
    assert (report.flops("engine"), report.flops("eager")) == (2 * 8 * 8 * 8, 2 * 8 * 8 * 8)


def test_share():
    assert (share(3, 1), share(0, 5), share(0, 0)) == (0.75, 0.0, 1.0)
