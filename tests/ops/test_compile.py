"""The Python calls are captured whole by Dynamo, and aliasing arguments survive eager and compiled calls."""

import pytest
import torch
from torch import Tensor

from dlinfer import ops
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
    k_cache, v_cache = caches
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
    mixed = (a + b).flatten(1) @ w["out"] + c.sum()
    tables = (step["cos"][:, None], step["sin"][:, None])
    turned = ops.apply_rotary_pos_emb_interleaved(mixed.view(-1, 2, 16), *tables, True)
    first, second = ops.linears(turned.flatten(1), [w["square"], w["square"]], [None, w["norm"]])
    mixed = mixed + ops.silu_mul(first, second) + ops.gelu_mul(first, second, True)
    adapters = (step["starts"], step["ranks"], step["scalings"], step["adapters"])
    mixed = ops.lora_linear(mixed, turned.flatten(1), w["lora_a"], w["lora_b"], *adapters)
    sequences = (step["slots_of"], ends, step["fresh"])
    mixed = mixed + ops.causal_conv1d(mixed, w["taps"], None, mixed.new_zeros(6, 32, 7), *sequences)
    heads, rate = mixed.view(-1, 2, 16), mixed[:, :2].sigmoid()
    states = mixed.new_zeros(6, 2, 16, 16)
    mixed = mixed + ops.gated_delta_rule(heads, heads, heads, -rate, rate, states, *sequences).flatten(1)
    keys, values = k_cache[:, :, :1], v_cache[:, :, :1]
    chosen = ops.lightning_indexer(heads, keys, rate, ends, lens, table, 6)
    pages = (table, ends, lens)
    sparse = ops.sparse_flash_attention(heads, keys, values, chosen, 0.25, *pages, heads, keys)
    mixed = mixed + sparse.flatten(1)
    gates = ops.silu_and_mul(mixed.repeat(1, 2))
    weights, ids = ops.moe_gating_topk_softmax(mixed @ w["router"], 2, metadata)
    offsets = (w["gate_up"][..., 0], w["down"][..., 0])
    gates = ops.fused_moe_clamped(
        gates, w["gate_up"], offsets[0], w["down"], offsets[1], weights, ids, 1.7, 7.0
    )
    return ops.fused_moe(gates, w["gate_up"], w["down"], weights, ids, 2, True, metadata, None), residual


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
        "taps": (hidden, 7),
        "lora_a": (7, hidden),
        "lora_b": (7, hidden),
        "gate_up": (4, 32, hidden),
        "down": (4, hidden, 16),
    }
    w = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    table = torch.arange(2 * len(lens)).view(len(lens), 2)
    slots = torch.cat([table[i, 0] * 8 + torch.arange(n) for i, n in enumerate(lens)])
    step = {"cos": torch.randn(tokens, 16), "sin": torch.randn(tokens, 16), "slots": slots}
    step |= {"lens": torch.tensor(lens), "table": table, "adapters": torch.arange(tokens) % 3 - 1}
    step |= {"slots_of": torch.arange(len(lens)), "fresh": torch.tensor(lens) > 2}
    step |= {
        "starts": torch.tensor([0, 4]),
        "ranks": torch.tensor([4, 3]),
        "scalings": torch.tensor([0.5, 2.0]),
    }
    caches = [torch.zeros(16, 8, 2, 16) for _ in range(2)]
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
