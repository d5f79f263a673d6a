"""``torch.compile(model, backend="dlinfer")`` of models on the fake device, through its own engine."""

import pytest
import torch
from fake_accel import kernels
from fake_accel.torch_device import NAME
from torch import nn

from dlinfer import ops, settings
from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.report import report
from dlinfer.ops.core import fallback

HIDDEN, HEADS, KV_HEADS, SIZE, BLOCKS, BLOCK = 32, 4, 2, 8, 6, 4


class Layer(nn.Module):
    """One decoder layer over a paged cache, as Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList([nn.Parameter(torch.rand(HIDDEN) + 0.5) for _ in range(2)])
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE, bias=True)
        self.out = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * 48, bias=False)
        self.down = nn.Linear(48, HIDDEN, bias=False)

    def forward(self, x, step, caches):
        tokens = x.shape[0]
        normed = ops.rms_norm(x, self.norms[0], 1e-6)
        q, k, v = self.qkv(normed).view(tokens, -1, SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = ops.apply_rotary_pos_emb(q.contiguous(), k.contiguous(), step["cos"], step["sin"])
        ops.fill_kv_cache(k, v, *caches, step["slots"])
        attended = ops.paged_prefill_attention(
            q, k, v, *caches, step["blocks"], BLOCK, step["q_ends"], step["kv_lengths"], step["longest"],
            step["longest"], HEADS, KV_HEADS,
        )  # fmt: skip
        x = x + self.out(attended.reshape(tokens, -1))
        normed = ops.rms_norm(x, self.norms[1], 1e-6)
        gate, up = self.gate_up(normed).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Model(nn.Module):
    """Two layers and a head. step: what differs from step to step, lengths on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(HIDDEN, 50, bias=False)

    def forward(self, ids, step, caches):
        x = self.embed(ids)
        for layer, pair in zip(self.layers, caches, strict=True):
            x = layer(x, step, pair)
        return self.head(x)


def arguments(lengths: list[int], device: str, order: str) -> tuple:
    """Prompts of these lengths, each beginning a block: (token ids, step, caches)."""
    torch.manual_seed(sum(lengths))
    tokens = sum(lengths)
    shape = (BLOCKS, BLOCK, KV_HEADS, SIZE) if order == "BSHD" else (BLOCKS, KV_HEADS, BLOCK, SIZE)
    first = [2 * BLOCK * number for number in range(len(lengths))]
    angles = torch.rand(tokens, SIZE)
    ends = torch.tensor(lengths).cumsum(0).int()
    step = {
        "cos": angles.cos().to(device),
        "sin": angles.sin().to(device),
        "slots": torch.cat([torch.arange(n) + start for n, start in zip(lengths, first, strict=True)]).to(
            device
        ),
        "blocks": torch.tensor([[2 * n, 2 * n + 1] for n in range(len(lengths))], dtype=torch.int32).to(
            device
        ),
        "q_ends": ends,
        "kv_lengths": torch.tensor(lengths, dtype=torch.int32),
        "longest": max(lengths),
    }
    caches = [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in range(2)]
    return torch.randint(0, 50, (tokens,)).to(device), step, caches


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def test_a_llama_through_the_device_s_engine_equals_the_host(model):
    inputs = [([3], "first"), ([5, 2], "more"), ([1, 7, 4], "most")]
    with torch.no_grad(), settings.override(fallback="allow"):
        wanted = []
        for lengths, _ in inputs:
            given = arguments(lengths, "cpu", "BSHD")
            wanted.append((model(*given), given[2]))
        moved = model.to(NAME)
        run = torch.compile(moved, backend="dlinfer", fullgraph=True)
        for (lengths, _), (logits, caches) in zip(inputs, wanted, strict=True):
            given = arguments(lengths, NAME, "BHSD")
            found = run(*given)
            assert found.device.type == NAME
            torch.testing.assert_close(found.cpu(), logits, rtol=1e-5, atol=1e-5)
            for pair, other in zip(given[2], caches, strict=True):
                for cache, wanted_cache in zip(pair, other, strict=True):
                    torch.testing.assert_close(
                        cache.cpu().transpose(1, 2), wanted_cache, rtol=1e-5, atol=1e-5
                    )
    last = report.reports()[-1]
    assert last.engine == "fakegraphs" and last.regions
    assert [node.op for node in last.nodes if node.place == "eager"] == []
    assert kernels.calls["rms_norm"] and kernels.calls["fill_kv_cache"]


def test_the_graph_s_device_is_the_accelerator_wherever_it_stands_among_the_inputs():
    host, here = torch.ones(2), torch.ones(2, device=NAME)
    for values in ((host, here), (here, host), (1, host, None, here)):
        assert graph_device(values).type == NAME
    assert graph_device((1, host)).type == "cpu" and graph_device(()).type == "cpu"
    sizes = torch.empty(2, device="meta")
    assert graph_device((sizes, here)).type == NAME and graph_device((sizes, host)).type == "cpu"
    assert graph_device((sizes,)).type == "meta"


def test_a_graph_without_inputs_runs_where_its_tensors_are_made():
    def made():
        return torch.arange(6, device=NAME).view(2, 3) + 1

    with torch.no_grad():
        found = torch.compile(made, backend="dlinfer", fullgraph=True)()
    assert found.device.type == NAME and found.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert report.reports()[-1].engine == "fakegraphs"


def test_host_lengths_come_first_and_the_device_s_engine_still_runs():
    def scaled(lengths, x):
        longest = lengths.max() * 1  # on the host
        return x * 2 + longest.to(x.device)

    with torch.no_grad():
        run = torch.compile(scaled, backend="dlinfer", fullgraph=True)
        found = run(torch.tensor([3, 4]), torch.ones(2, device=NAME))
    assert found.tolist() == [6, 6]
    assert report.reports()[-1].engine == "fakegraphs"


@pytest.mark.parametrize("engine", ["inductor", "onnxruntime", "openvino"])
def test_an_engine_of_the_host_refuses_the_device_s_tensors_by_name(engine):
    def function(x, weight):
        return ops.rms_norm(x, weight, 1e-6) * 2 + 1

    fallback.reset()
    given = torch.ones(3, device=NAME), torch.ones(3, device=NAME)
    with torch.no_grad(), settings.override(fallback="allow"):
        run = torch.compile(
            function, backend="dlinfer", options={"engine": engine, "small_regions": "engine"}
        )
        torch.testing.assert_close(run(*given).cpu(), torch.full((3,), 3.0))
    nodes = report.reports()[-1].nodes
    assert {(node.place, node.reason) for node in nodes} == {
        ("eager", f"it uses a tensor on device {NAME!r}")
    }
