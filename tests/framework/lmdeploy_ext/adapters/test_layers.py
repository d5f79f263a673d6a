"""LoRA layers hold the weights and scalings of each adapter's file, where rows are reserved and where not."""

import math

import pytest
import torch
from safetensors.torch import load_file

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.adapters import layers
from dlinfer.framework.lmdeploy_ext.adapters.layers import Place
from dlinfer.framework.lmdeploy_ext.checks.model.adapters import Adapter
from tests.framework.lmdeploy_ext.adapters.adapter_models import added, build, check, modules, save


@pytest.fixture
def folders(tmp_path):
    """Two adapters: ranks 3 and 2 by pattern; rank 4 in one module, rank-stabilised, alpha by pattern."""
    one = save(tmp_path / "one", 1, {"gate_proj": 3, "layers.1.mlp.down_proj": 2})
    two = save(tmp_path / "two", 2, {"up_proj": 4}, use_rslora=True, alpha_pattern={"up_proj": 3})
    return {"b": one, "a": two}


ONE = {"gate_proj": 2.0, "down_proj": 3.0}
TWO = {"up_proj": 3 / math.sqrt(4)}


@pytest.mark.parametrize("reserved", [None, 1, 5])
def test_adapters_given_at_start(reserved, folders):
    with settings.override(cpu_adapter_rows=reserved):
        model = build(folders)
    check(model, 1, folders["a"], TWO)
    check(model, 2, folders["b"], ONE)
    assert not added(model, 0)


def test_without_reserved_rows_only_layers_of_adapters_are_built(folders):
    model = build(folders)
    names = {path for path, m in modules(model).items() if path.rpartition(".")[2] in m.linear.lora_adapters}
    mlps = [f"model.layers.{layer}.mlp" for layer in range(2)]
    assert names == {f"{mlp}.{name}" for mlp in mlps for name in ("gate_proj", "up_proj")} | {
        "model.layers.1.mlp.down_proj"
    }
    assert modules(model)["model.layers.1.mlp.down_proj"].linear.lora_adapters["down_proj"].lora_A.shape == (
        2,
        6,
    )


def test_rows_written_later_move_and_leave_others_alone(folders):
    with settings.override(cpu_adapter_rows=6):
        model = build({})
    weights = [p.data_ptr() for p in model.parameters()]
    assert {len(m.linear.lora_adapters) for m in modules(model).values()} == {1, 2}
    one, two = Adapter("b", folders["b"]), Adapter("a", folders["a"])
    with torch.inference_mode():
        layers.write(model, Place(3, 2, 3), one.layers_of(model), one.weights_of(model))
        check(model, 3, folders["b"], ONE)
        layers.move(model, [(Place(0, 0, 0), Place(0, 0, 0)), (Place(3, 2, 3), Place(3, 0, 3))])
        check(model, 3, folders["b"], ONE)
        layers.write(model, Place(1, 3, 3), one.layers_of(model), one.weights_of(model))
        layers.write(model, Place(3, 0, 3), {}, [])
        assert not added(model, 3)
        check(model, 1, folders["b"], ONE)
        layers.move(model, [(Place(1, 3, 3), Place(1, 1, 3))])  # onto its own rows
        check(model, 1, folders["b"], ONE)
        layers.move(model, [(Place(1, 1, 3), Place(1, 0, 3))])
        layers.write(model, Place(2, 3, 3), one.layers_of(model), one.weights_of(model))
        layers.write(model, Place(2, 0, 4), two.layers_of(model), two.weights_of(model))
        check(model, 2, folders["a"], TWO)
    assert [p.data_ptr() for p in model.parameters()] == weights, "compiled graphs read the same tensors"


@pytest.mark.parametrize("reserved", [None, 5])
def test_dora_scales_the_rows_of_the_merged_weight(reserved, tmp_path, folders):
    path = save(tmp_path / "dora", 3, {"up_proj": 2}, use_dora=True)
    tensors = load_file(path + "/adapter_model.safetensors")
    with settings.override(cpu_adapter_rows=reserved):
        model = build({"a": path, "b": folders["b"]})
    products = added(model, 1)
    assert len(products) == 2
    for name, product in products.items():
        module = modules(model)[name]
        gains = module.linear.lora_adapters["up_proj"].gains
        weight = module.linear.weight[module.columns()].double()
        a, b, magnitude = (
            tensors[f"base_model.model.{name}.lora_{side}"].double()
            for side in ("A.weight", "B.weight", "magnitude_vector")
        )
        merged = weight + 3 * b @ a
        wanted = magnitude[:, None] * merged / merged.norm(dim=1, keepdim=True)
        torch.testing.assert_close(
            weight * (1 + gains[1].double())[:, None] + product, wanted, rtol=1e-5, atol=1e-5
        )
        assert not gains[[0, 2]].any()
    check(model, 2, folders["b"], ONE)
    if reserved:
        with torch.inference_mode():
            layers.write(model, Place(1, 0, 2), {}, [])
        assert not any(gains.any() for name, gains in model.named_buffers() if name.endswith("gains"))
