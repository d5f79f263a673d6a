"""The Python calls are captured whole by Dynamo, and aliasing arguments survive eager and compiled calls."""

import pytest
import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.ops.collective.groups import ALONE
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised import bf12
from dlinfer.ops.quantised.gguf_samples import packed as packed_gguf
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.utils.type_annotation import MoeMetadata
from tests.ops import cases

torch_graphs: list[torch.fx.GraphModule] = []


def capturing(graph: torch.fx.GraphModule, inputs: list[Tensor]):
    """A backend that runs Dynamo's graph as it is, mutations included."""
    torch_graphs.append(graph)
    return graph.forward


BACKENDS = {"aot_eager": "aot_eager", "not functionalised": capturing}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch_graphs.clear()


def compiled(function, backend: str, **options):
    return torch.compile(function, backend=BACKENDS[backend], fullgraph=True, **options)


# --- aliasing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=cases.short)
@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize(("op", "name"), cases.names(aliased=True))
def test_samples_that_alias(op, name, backend, dtype):
    spec, args = ops.registry()[op], cases.sample(op, name, dtype).args
    want = cases.expected(spec, args)

    def call(*args):
        return spec.overload(*args)

    returned = (call if backend == "eager" else compiled(call, backend))(*args)
    cases.assert_close(cases.results(spec, args, returned), want, spec.tolerances[dtype])


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_output_in_a_view_of_q_made_inside_the_graph(backend):
    def layer(qkv: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = qkv.split((4, 2, 2), dim=1)
        doubled = q * 2
        out = ops.prefill_attention(
            doubled, k, v, None, None, lengths, lengths, 9, 4, 2, [], attn_output=doubled[..., :16]
        )
        return out.flatten(1) + 1

    qkv, lengths = torch.randn(12, 8, 16), torch.tensor([9, 3])
    q, k, v = qkv.split((4, 2, 2), dim=1)
    want = ops.prefill_attention(q * 2, k, v, None, None, lengths, lengths, 9, 4, 2).flatten(1) + 1
    got = (layer if backend == "eager" else compiled(layer, backend))(qkv.clone(), lengths)
    torch.testing.assert_close(got, want)


# --- the Python calls in one graph


def layers(x: Tensor, residual: Tensor, w: dict[str, Tensor], step: dict[str, Tensor], caches: list[Tensor]):
    """One prefill and one decode of every op, as LMDeploy's adaptor calls them."""
    k_cache, v_cache, *quantised, conv_state, recurrent_state = caches
    metadata = MoeMetadata()
    h = ops.rms_norm(x, w["norm"], 1e-6)
    h, residual = ops.add_rms_norm(h, residual, w["norm"], 1e-6)
    qkv = ops.linear(h, w["qkv"], w["bias"], False).view(-1, 8, 16)
    q, k, v = qkv.split((4, 2, 2), dim=1)
    q, k = ops.apply_rotary_pos_emb(q, k, step["cos"], step["sin"], None, None)
    k_cache, v_cache = ops.fill_kv_cache(k, v, k_cache, v_cache, step["slots"], [], [], quant_bits=0)
    ends, lens, table = step["lens"].cumsum(0), step["lens"], step["table"]
    a = ops.prefill_attention(
        q, k, v, k_cache, v_cache, lens, lens, 5, 4, 2, [], attn_output=q.clone(), actual_seq_lengths_cpu=ends
    )
    b = ops.paged_prefill_attention(
        q, k, v, k_cache, v_cache, table, 8, ends, lens, 5, 5, 4, 2, (), head_size_v=16, quant_bits=0
    )
    c = ops.paged_decode_attention(
        q[ends - 1], k_cache, v_cache, table, 8, ends, lens, 5, 4, 2, softmax_scale=0.25, sliding_window=4
    )
    k_codes, v_codes = ops.fill_kv_cache(k, v, *quantised[:2], step["slots"], *quantised[2:], quant_bits=8)
    scales = {"quant_bits": 8, "k_scales_zeros": quantised[2], "v_scales_zeros": quantised[3]}
    b = b + ops.paged_prefill_attention(
        q, k, v, k_codes, v_codes, table, 8, ends, lens, 5, 5, 4, 2, (), **scales
    )
    c = c + ops.paged_decode_attention(q[ends - 1], k_codes, v_codes, table, 8, ends, lens, 5, 4, 2, **scales)
    mixed = (a + b).flatten(1) @ w["out"] + c.sum()
    tables = (step["cos"][:, None], step["sin"][:, None])
    turned = ops.apply_rotary_pos_emb_interleaved(mixed.view(-1, 2, 16), *tables, True)
    first, second = ops.linears(turned.flatten(1), [w["square"], w["square"]], [None, w["norm"]])
    mixed = mixed + ops.silu_mul(first, second) + ops.gelu_mul(first, second, True)
    adapters = (step["starts"], step["ranks"], step["scalings"], step["adapters"])
    mixed = ops.all_reduce(mixed, ALONE)
    mixed = ops.lora_linear(mixed, turned.flatten(1), w["lora_a"], w["lora_b"], *adapters)
    packed = (w["packed"], w["packed_scales"])
    mixed = mixed + ops.weight_quant_matmul(mixed, *packed, offset=w["packed_zeros"], group_size=16)
    mixed = ops.linear_bf12(mixed, w["bf12"], w["norm"], out_features=32)
    mixed = mixed + ops.embedding_bf12(step["slots"], w["bf12_table"], 128, 32)
    mixed = ops.linear_gguf(mixed, w["gguf"], w["norm"], types=[8, 2], rows=[24, 8])
    mixed = mixed + ops.embedding_gguf(step["slots"], w["gguf_table"], 8, 128, 32, mixed.dtype)
    gates = ops.silu_and_mul(mixed.repeat(1, 2))
    gates = gates + eight_bits(gates.tanh(), w)
    weights, ids = ops.moe_gating_topk_softmax(mixed @ w["router"], 2, metadata)
    gates = gates + eight_bit_experts(gates.tanh(), weights, ids, w)
    gates = gates + with_states(gates.tanh(), w, step, conv_state, recurrent_state, ends)
    gates = gates + sparse(gates, q, k_cache, v_cache, step, ends)
    packed_experts = (
        w["packed_gate_up"],
        w["packed_gate_up_scales"],
        None,
        w["packed_down"],
        w["packed_down_scales"],
        None,
    )
    routes = (weights, ids, 2, True, 16)
    gates = gates + ops.fused_moe_w4a16(gates.tanh(), *packed_experts, *routes)
    floats = (
        w["packed_gate_up"],
        w["powers"],
        w["gate_up_bias"],
        w["packed_down"],
        w["powers"],
        w["down_bias"],
    )
    gates = gates + ops.fused_moe_mxfp4(gates.tanh(), *floats, weights, ids, 1.7, 7.0)
    without_bias = (*floats[:2], *floats[3:5], weights, ids, 7.0)
    gates = gates + ops.fused_moe_limited_mxfp4(gates.tanh(), *without_bias)
    in_12_bits = (w["bf12_gate_up"], w["bf12_down"], weights, ids)
    gates = gates + ops.fused_moe_bf12(gates.tanh(), *in_12_bits, True, 4, 16)
    in_blocks = (w["gguf_gate_up"], w["gguf_down"], weights, ids)
    gates = gates + ops.fused_moe_gguf(gates.tanh(), *in_blocks, True, 32, [2, 8], 8)
    biases = (w["gate_up_bias"], w["down"], w["down_bias"])
    gates = gates + ops.fused_moe_clamped(gates.tanh(), w["gate_up"], *biases, weights, ids, 1.7, 7.0)
    limited = (w["gate_up"], w["down"], weights, ids, 7.0)
    gates = gates + ops.fused_moe_limited(gates.tanh(), *limited)
    return ops.fused_moe(gates, w["gate_up"], w["down"], weights, ids, 2, True, metadata, None), residual


def with_states(
    x: Tensor, w: dict[str, Tensor], step: dict[str, Tensor], conv_state: Tensor, state: Tensor, ends: Tensor
) -> Tensor:
    """Layers whose states are of a sequence."""
    where = (step["slots of states"], ends, step["fresh"])
    heads = ops.causal_conv1d(x, w["convolution"], None, conv_state, *where).view(-1, 2, 16)
    return ops.gated_delta_rule(
        heads, heads, heads, -x[:, :2].exp(), x[:, :2].sigmoid(), state, *where
    ).flatten(1)


def sparse(
    x: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, step: dict[str, Tensor], ends: Tensor
) -> Tensor:
    """Attention to chosen tokens, of caches with one head."""
    keys, values, lens, table = k_cache[:, :, :1], v_cache[:, :, :1], step["lens"], step["table"]
    chosen = ops.lightning_indexer(q, keys, x[:, :4], ends, lens, table, 3)
    rope = (q, values)
    out = ops.sparse_flash_attention(
        q[:, :2], keys, values, chosen, 0.25, table, ends, lens, rope[0][:, :2], rope[1]
    )
    return out.flatten(1) + compressed(x, q, keys, step, ends)


def compressed(x: Tensor, q: Tensor, entries: Tensor, step: dict[str, Tensor], ends: Tensor) -> Tensor:
    """Attention to a window and to compressed entries. Its states are made here, and forgotten."""
    lens, table, slots = step["lens"], step["table"], step["slots of states"]
    past = lens - ends.diff(prepend=ends.new_zeros(1))
    state = x.new_zeros(8, 2, 8, 32)
    rows = ops.compress_windows(x, x.tanh(), x.new_ones(4, 32), state, slots, ends, past, 16)
    chosen = ops.compressed_indexer(q, entries, x[:, :4], ends, lens, table, 4, 3)
    window = (x.new_ones(2), x.new_zeros(8, 4, 16), slots, ends, lens, entries, table, chosen, 4, 0.25)
    out = ops.compressed_attention(q[:, :2], rows, *window).flatten(1)
    mixing = ops.sinkhorn(x[:, :16].unflatten(1, (4, 4)), 3, 1e-6)
    return out * mixing.flatten(1).sum(1, keepdim=True)


def eight_bits(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Every linear layer of 8-bit numbers, and what feeds them."""
    float32, int8 = torch.float32, torch.int8
    row = w["scale"].flatten()
    numbers, scale, total = ops.add_rms_norm_w8a8(x, x, w["norm"], 1e-6, int8)
    x = ops.linear_w8a8(numbers, w["int8"], scale, w["scale"], float32, int8, w["norm"]) + total
    numbers, scale = ops.rms_norm_w8a8(x, w["norm"], 1e-6, int8)
    x = ops.linear_w8a8(numbers, w["int8"], scale, w["scale"], float32, int8, None)
    numbers, scale = ops.dynamic_quant(x, torch.float8_e4m3fn, "PER_TOKEN")
    x = ops.linear_w8a8(numbers, w["fp8"], scale, w["scale"], float32, torch.float8_e4m3fn, None)
    x = ops.linear_w8a8_static(x, w["int8"], w["one"], w["one"].to(int8), row, float32, int8, None)
    x = ops.linear_blocked_fp8(x, w["fp8"], w["blocks"], w["norm"], 16, True)
    return ops.linear_static_fp8(x, w["fp8"], row, w["one"], None)


def eight_bit_experts(x: Tensor, weights: Tensor, ids: Tensor, w: dict[str, Tensor]) -> Tensor:
    routes = (weights, ids, 2, True)
    rows, blocks, one = w["expert_rows"], w["expert_blocks"], w["one"]
    for name in ("int8", "fp8"):
        gate_up, down = w[f"{name}_gate_up"], w[f"{name}_down"]
        x = ops.fused_moe_w8a8(x, gate_up, rows, down, rows, *routes, MoeMetadata())
    x = ops.fused_moe_blocked_fp8(x, gate_up, blocks, down, blocks[..., :1], *routes, 16, False)
    return ops.fused_moe_static_fp8(x, gate_up, rows, one, down, rows, one, *routes)


def inputs(lens: tuple[int, ...]):
    torch.manual_seed(len(lens))
    tokens, hidden = sum(lens), 32
    shapes = {
        "norm": (hidden,),
        "qkv": (128, hidden),
        "bias": (128,),
        "out": (64, hidden),
        "router": (hidden, 4),
        "square": (hidden, hidden),
        "lora_a": (7, hidden),
        "lora_b": (7, hidden),
        "gate_up": (4, 32, hidden),
        "down": (4, hidden, 16),
        "gate_up_bias": (4, 32),
        "down_bias": (4, hidden),
        "convolution": (hidden, 4),
    }
    w = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    packed, scales, zeros = AWQ.of_groups(16).quantise(w["square"])
    assert zeros is not None
    w |= {"packed": packed, "packed_scales": scales, "packed_zeros": zeros}
    w |= {"bf12": bf12.pack(w["square"].bfloat16()), "bf12_table": bf12.pack(w["qkv"].bfloat16())}
    make = SampleMaker(torch.float32)
    w |= {"gguf": packed_gguf(make, [8, 2], [24, 8], 32), "gguf_table": packed_gguf(make, [8], [128], 32)}
    w |= {"gguf_gate_up": torch.stack([packed_gguf(make, [2, 8], [32, 32], 32) for _ in range(4)])}
    w |= {"gguf_down": torch.stack([packed_gguf(make, [8], [32], 32) for _ in range(4)])}
    w |= {f"bf12_{name}": bf12.pack(w[name].flatten(0, 1).bfloat16()) for name in ("gate_up", "down")}
    w["powers"] = torch.exp2(torch.randint(-4, -1, (4, 1, 32)).float())
    for name, groups, columns in (("gate_up", 2, 4), ("down", 1, 4)):
        w[f"packed_{name}"] = torch.randint(-(2**31), 2**31, (4, 16 * groups, columns)).int()
        w[f"packed_{name}_scales"] = torch.rand(4, groups, 8 * columns) / 50
    w |= {"scale": torch.rand(hidden, 1) / 50, "blocks": torch.rand(2, 2) / 50, "one": torch.ones(1) / 16}
    w |= {"expert_rows": torch.rand(4, hidden, 1) / 5, "expert_blocks": torch.rand(4, 2, 2) / 5}
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        for suffix, shape in (
            ("", (hidden, hidden)),
            ("_gate_up", (4, 32, hidden)),
            ("_down", (4, hidden, 16)),
        ):
            w[name + suffix] = torch.randint(-9, 10, shape).to(dtype)
    table = torch.arange(2 * len(lens)).view(len(lens), 2)
    slots = torch.cat([table[i, 0] * 8 + torch.arange(n) for i, n in enumerate(lens)])
    step = {"cos": torch.randn(tokens, 16), "sin": torch.randn(tokens, 16), "slots": slots}
    step |= {"lens": torch.tensor(lens), "table": table, "adapters": torch.arange(tokens) % 3 - 1}
    step |= {
        "starts": torch.tensor([0, 4]),
        "ranks": torch.tensor([4, 3]),
        "scalings": torch.tensor([0.5, 2.0]),
    }
    step |= {"slots of states": torch.arange(len(lens)), "fresh": torch.arange(len(lens)) > 0}
    caches = [torch.zeros(16, 8, 2, 16) for _ in range(2)]
    caches += [torch.zeros(16, 8, 2, 16, dtype=torch.uint8) for _ in range(2)]
    caches += [torch.zeros(16, 8, 2, 2) for _ in range(2)]
    caches += [torch.randn(11, hidden, 4), torch.randn(11, 2, 16, 16)]
    return torch.randn(1, tokens, hidden), torch.randn(1, tokens, hidden), w, step, caches


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_python_call_in_one_graph(backend, dynamic):
    function = compiled(layers, backend, dynamic=dynamic)
    for lens in ((5, 4, 1), (4, 2, 5, 5)):  # sizes that meet no other: Dynamo takes equal ones for the same
        x, residual, w, step, caches = inputs(lens)
        eager_caches = [cache.clone() for cache in caches]
        want = layers(x.clone(), residual.clone(), w, step, eager_caches)
        got = function(x, residual, w, step, caches)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(caches, eager_caches)
    if backend == "not functionalised":
        called = {str(node.target) for node in torch_graphs[0].graph.nodes if node.op == "call_function"}
        assert {f"dlinfer.{name}.default" for name in ops.registry()} <= called
        assert len(torch_graphs) == (1 if dynamic else 2)


def test_a_wrong_argument_is_named_while_compiling():
    function = compiled(lambda x, w: ops.rms_norm(x, w, 1e-6), "aot_eager")
    with pytest.raises(Exception, match="argument weight: expected size 8 in dimension 0"):
        function(torch.randn(2, 8), torch.randn(9))


def test_sizes_that_a_graph_cannot_know():
    x, cos, sin = torch.randn(5, 2, 8), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    for tensor in (x, cos, sin):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.apply_rotary_pos_emb_interleaved(x, cos, sin, False)

    torch.testing.assert_close(compiled(rotated, "aot_eager")(x, cos, sin), rotated(x, cos, sin))
