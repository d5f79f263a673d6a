"""LoRA on several ranks: their parts of A and of B, and one sum for the layer and its adapters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch import distributed

from dlinfer.framework.lmdeploy_ext.checks.model.adapters import LoraModule
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.ranks import adapters


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(activation, "_active", "cpu")


def layer(all_reduce: bool) -> Any:
    return SimpleNamespace(
        _forward_default=lambda x, reduce, sizes: x * 2 if not reduce else pytest.fail("summed too early"),
        lora_adapters={"one": lambda x, out: out + x, "two": lambda x, out: out + 10},
        all_reduce=all_reduce,
        tp_group="group",
    )


@pytest.mark.parametrize("all_reduce", [False, True])
def test_a_layer_and_its_adapters_take_one_sum(all_reduce, monkeypatch):
    sums = []

    def summed(x: torch.Tensor, group: object) -> torch.Tensor:
        sums.append(group)
        return x * 100

    monkeypatch.setattr(adapters.ops, "all_reduce", summed)
    forward = adapters._forward_lora.build(lambda *_: pytest.fail("LMDeploy's own"))
    out = forward(layer(all_reduce), torch.ones(2))
    assert out.tolist() == [1300.0 if all_reduce else 13.0] * 2
    assert sums == (["group"] if all_reduce else [])


@pytest.mark.parametrize(
    ("out", "rank", "rows"), [(8, 1, slice(8, 16)), (16, 1, slice(0, 16)), (16, 2, slice(16, 32))]
)
def test_a_part_of_b(out, rank, rows, monkeypatch):
    """Of 32 outputs four ranks have 8 each, or two ranks the same 16. The second adapter's rows follow the first's."""
    monkeypatch.setattr(distributed, "get_tp_world_rank", lambda: (4, rank))
    load = adapters._load_b.build(lambda *_: pytest.fail("LMDeploy's own"))
    info = SimpleNamespace(
        out_features=out, ranks=torch.tensor([0, 2, 3]), rank_offsets=torch.tensor([0, 0, 2])
    )
    lora = SimpleNamespace(is_tp=True, colwise=True, lora_b_spliter=None, adapter_info=info)
    param = torch.nn.Parameter(torch.zeros(5, out), requires_grad=False)
    b = torch.arange(96.0).reshape(32, 3)
    load(lora, param, b, 2)
    assert torch.equal(param[2:], b[rows].t())
    assert not param[:2].any()


def test_layers_that_are_whole_are_loaded_by_lmdeploy():
    calls = []
    load = adapters._load_b.build(lambda *args: calls.append(args))
    whole = SimpleNamespace(is_tp=False, colwise=True, lora_b_spliter=None)
    load(whole, "param", "b", 1)
    assert calls == [(whole, "param", "b", 1)]


def test_sizes_over_all_ranks():
    joined = SimpleNamespace(
        in_features=64,
        out_features=64,
        all_out_features=(32, 16, 16),
        colwise=True,
        tp=4,
        num_replicate_kv_heads=2,
    )
    assert LoraModule(joined, 0).sizes() == (64, 128)
    assert LoraModule(joined, 1).sizes() == (64, 32)
    rows = SimpleNamespace(in_features=16, out_features=64, colwise=False, tp=4)
    assert LoraModule(rows, None).sizes() == (64, 64)
