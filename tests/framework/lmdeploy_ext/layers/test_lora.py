"""LoRA layers as LMDeploy calls them, against float64: merged layers, several adapters, none."""

from types import SimpleNamespace

import pytest
import torch
from lmdeploy.pytorch.backends import get_backend
from lmdeploy.pytorch.backends.lora import AdapterInfo, LoRABuildSpec

from dlinfer.framework.lmdeploy_ext.layers.lora import Lora

IN, OUT, RANKS = 12, 20, [0, 3, 5]  # the first is the base model


def context(adapter_ids):
    metadata = SimpleNamespace(adapter_ids=adapter_ids)
    return SimpleNamespace(current_context=lambda: SimpleNamespace(attn_metadata=metadata))


def layer(columns: slice):
    ranks, scalings = torch.tensor(RANKS), torch.tensor([1, 2.0, 0.25])
    outputs = columns.stop - columns.start
    info = AdapterInfo(IN, outputs, ranks, scalings, columns)
    return torch.randn(sum(RANKS), IN), torch.randn(sum(RANKS), outputs), info


def added(x, a, b, info, ids):
    """What is added to each row, float64 [tokens, outputs]."""
    rows = torch.zeros(len(ids), b.shape[1], dtype=torch.float64)
    for row, adapter in enumerate(ids):
        first = sum(RANKS[:adapter])
        low = a[first : first + RANKS[adapter]].double() @ x[row].double()
        rows[row] = float(info.scalings[adapter]) * low @ b[first : first + RANKS[adapter]].double()
    return rows


@pytest.mark.parametrize("columns", [slice(0, OUT), slice(0, 8), slice(8, 14), slice(14, OUT)], ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (5,)], ids=str)
def test_each_token_gets_its_adapter_in_the_layers_columns(columns, shape):
    impl = get_backend("cpu").build_op(LoRABuildSpec())
    assert isinstance(impl, Lora)
    a, b, info = layer(columns)
    x, base = torch.randn(*shape, IN), torch.randn(*shape, OUT)
    ids = [1, 0, 2, 2, 1]
    want = base.double().flatten(0, -2)
    want[:, columns] += added(x.flatten(0, -2), a, b, info, ids)
    out = impl.forward(x, a, b, base.clone(), info, context(torch.tensor(ids)), True)
    assert out.shape == base.shape
    torch.testing.assert_close(out.flatten(0, -2).double(), want, rtol=1e-5, atol=1e-5)
    outside = [i for i in range(OUT) if not columns.start <= i < columns.stop]
    assert torch.equal(out[..., outside], base[..., outside])


@pytest.mark.parametrize("ids", [None, torch.zeros(4, dtype=torch.int64)], ids=["no adapters", "nobody"])
def test_the_base_model_is_itself_bit_by_bit(ids):
    a, b, info = layer(slice(4, OUT))
    x, base = torch.randn(1, 4, IN), torch.randn(1, 4, OUT)
    out = Lora().forward(x, a, b, base.clone(), info, context(ids), True)
    assert torch.equal(out, base)


@pytest.mark.parametrize("columns", [slice(0, OUT), slice(8, 14)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gains_of_dora_multiply_the_result_without_its_bias(columns, has_bias):
    a, b, info = layer(columns)
    outputs = columns.stop - columns.start
    gains, bias = torch.randn(len(RANKS), outputs), torch.randn(outputs)
    gains[0] = 0
    vars(info).update(gains=gains, base_bias=bias if has_bias else None)
    x, base, ids = torch.randn(1, 4, IN), torch.randn(1, 4, OUT), [1, 0, 2, 1]
    want = base[0].double()
    want[:, columns] += gains[ids].double() * (base[0, :, columns].double() - bias * has_bias)
    want[:, columns] += added(x[0], a, b, info, ids)
    out = Lora().forward(x, a, b, base.clone(), info, context(torch.tensor(ids)), True)
    torch.testing.assert_close(out[0].double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[0, 1], base[0, 1]), "without an adapter"
