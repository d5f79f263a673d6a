"""DLINFER_CPU_WEIGHTS=bf12: what LMDeploy loads is packed weight by weight, and every bit of it comes back."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.devices import DeviceContext, get_device_manager
from lmdeploy.pytorch.distributed import DistContext, get_dist_manager
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from lmdeploy.pytorch.model_inputs import BuildModelContext
from lmdeploy.pytorch.models import patch as models
from lmdeploy.pytorch.nn.linear import BaseLinear, MergedBaseLinear, QKVBaseLinear
from lmdeploy.pytorch.weight_loader import model_weight_loader as loader
from torch import Tensor, nn

from dlinfer import ops, settings
from dlinfer.framework.lmdeploy_ext.checks.model import build
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.layers.quantised import packing
from dlinfer.framework.lmdeploy_ext.layers.quantised.bf12 import (
    BF12,
    EmbeddingBF12,
    ExpertsBF12,
    HeadBF12,
    LinearBF12,
)
from dlinfer.framework.lmdeploy_ext.layers.quantised.head import PackedHead
from dlinfer.framework.lmdeploy_ext.preflight.check import preflight
from dlinfer.framework.lmdeploy_ext.preflight.model import engine_config
from dlinfer.ops.quantised import bf12
from dlinfer.vendor.cpu.device import CpuDevice
from tests.framework.lmdeploy_ext.quantise import folders

PADDING = 3


@pytest.fixture(autouse=True)
def asked():
    with settings.override(cpu_weights="bf12"):
        yield


def tensors(spread: bool = False) -> dict[str, Tensor]:
    """A folder's weights, whole. spread: with exponents all over, which BF12 has no codes for."""
    found = folders.tensors()
    for layer in range(folders.LAYERS):
        for name, size in (("k", folders.KV_HEADS), ("v", folders.KV_HEADS)):
            bias = torch.randn(size * folders.HEAD_DIM).bfloat16()
            found[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
        found[f"model.layers.{layer}.post_attention_layernorm.weight"] = torch.randn(
            folders.HIDDEN
        ).bfloat16()
        if spread:
            name = f"model.layers.{layer}.mlp.down_proj.weight"
            found[name] *= 2.0 ** torch.randint(-60, 60, found[name].shape)
    return found


def made(folder: Path, device: str = "cpu", sequences: int = 0, **options: Any) -> Any:
    """LMDeploy's model of a folder, its weights loaded. sequences: the engine's max_batch_size."""
    engine = engine_config("cpu", **options)
    distribution = ConfigBuilder.build_dist_config(engine)
    config = ModelConfig.from_pretrained(
        str(folder), dtype=engine.dtype, dist_config=distribution, device_type="cpu"
    )
    context = BuildModelContext(
        quant_config=config.quant_config,
        tie_word_embeddings=config.tie_word_embeddings,
        max_batch_size=sequences,
    )
    with (
        get_dist_manager().context(DistContext.build(0, distribution)),
        get_device_manager().context(DeviceContext("cpu")),
    ):
        model = models.build_patched_model(config, device=torch.device(device), build_model_ctx=context)
        if device == "cpu":
            loader.load_model_weights(model, str(folder), device=torch.device("cpu"))
    return model


def plain(folder: Path, **options: Any) -> Any:
    with settings.override(cpu_weights="kept"):
        return made(folder, **options)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


def linear_layers(model: nn.Module) -> dict[str, Any]:
    kinds = (BaseLinear, MergedBaseLinear, QKVBaseLinear)
    return {name: one for name, one in model.named_modules() if type(one) in kinds and "lm_head" not in name}


# The second has torch's own embedding, which has no loader; LMDeploy's zeroes the padding token's row, unless told.
@pytest.mark.parametrize("name", ["Qwen2", "Llama"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_every_bit_of_every_layer_is_there(tmp_path, shards, tied, name, caplog):
    more = {"tie_word_embeddings": tied, "pad_token_id": PADDING}
    more |= {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    found = {one: weight for one, weight in tensors().items() if name == "Qwen2" or not one.endswith("bias")}
    if tied:
        del found["lm_head.weight"]
    folders.write(tmp_path / "m", found, shards, **more)
    with caplog.at_level(logging.INFO, "dlinfer"):
        got, want = made(tmp_path / "m"), plain(tmp_path / "m")
    layers = linear_layers(got)
    assert len(layers) == 4 * folders.LAYERS
    for name, theirs in linear_layers(want).items():
        ours = layers[name]
        assert type(ours.impl) is LinearBF12
        assert (ours.weight.dtype, ours.weight.requires_grad) == (torch.uint8, False)
        assert torch.equal(bits(ours.get_unquantized_weight(torch.bfloat16)), bits(theirs.weight))
        assert ours.weight.untyped_storage().nbytes() == ours.weight.nbytes <= 0.8 * theirs.weight.nbytes
        assert (ours.bias is None) == (theirs.bias is None)
        assert ours.bias is None or torch.equal(ours.bias, theirs.bias)
    head, embedding = got.lm_head, got.model.embed_tokens
    assert type(head) is HeadBF12
    assert head.weight.dtype is torch.bfloat16
    assert torch.equal(bits(bf12.unpack(head.table, head.rows, head.columns)), bits(want.lm_head.weight))
    assert (type(embedding) is EmbeddingBF12) == tied
    ids = torch.tensor([[0, PADDING, folders.WORDS - 1]])
    assert torch.equal(bits(embedding(ids)), bits(want.model.embed_tokens(ids)))
    assert embedding(torch.tensor([PADDING])).any()
    if tied:
        assert embedding.table is head.table
        assert torch.equal(embedding.table, head.table)
    assert not hasattr(got, "packing")
    assert f"packed {4 * folders.LAYERS + 1} weights" in caplog.text
    assert "left 0 as they are" in caplog.text


def test_a_layer_computes_what_it_did(tmp_path):
    """Some tolerance: without the C++ kernel the product is torch's."""
    folders.write(tmp_path / "m", tensors())
    got, want = made(tmp_path / "m"), plain(tmp_path / "m")
    x = torch.randn(1, 3, folders.HIDDEN).bfloat16()
    for path in ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "lm_head"):
        ours, theirs = (one.get_submodule(path)(x) for one in (got, want))
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("choice", "kind"), [("kept", BaseLinear), ("int8", PackedHead), ("", HeadBF12)])
def test_the_projection_is_as_it_was_asked_for(tmp_path, choice, kind):
    folders.write(tmp_path / "m", tensors(), tie_word_embeddings=True)
    with settings.override(cpu_head=choice):
        model = made(tmp_path / "m")
    assert type(model.lm_head) is kind
    assert {type(one.impl) for one in linear_layers(model).values()} == {LinearBF12}


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("sequences", [0, 8])
def test_auto_packs_a_large_model_where_that_is_faster(tmp_path, sequences, faster, monkeypatch):
    """LMDeploy says 0 sequences where it does not know them."""
    folders.write(tmp_path / "m", tensors())
    asked = []
    monkeypatch.setattr(CpuDevice, "is_faster_with_bf12", lambda self, rows: asked.append(rows) or faster)
    with settings.override(cpu_weights="auto"):
        small = made(tmp_path / "m", sequences=sequences)
        monkeypatch.setattr(build, "_LARGE", 1)
        large = made(tmp_path / "m", sequences=sequences)
        planned = made(tmp_path / "m", "meta", sequences)
    assert asked == [max(sequences, 1)]
    packed = [
        {type(one.impl) is LinearBF12 for one in linear_layers(model).values()} for model in (small, large)
    ]
    assert packed == [{False}, {faster}]
    assert not hasattr(planned, "packing")


def test_auto_measures_no_other_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_LARGE", 1)
    monkeypatch.setattr(CpuDevice, "is_faster_with_bf12", lambda self, rows: pytest.fail("was asked"))
    folders.write(tmp_path / "m", {name: one.float() for name, one in tensors().items()}, dtype="float32")
    with settings.override(cpu_weights="auto"):
        model = made(tmp_path / "m")
    assert {type(one.impl) is LinearBF12 for one in linear_layers(model).values()} == {False}


def test_experts_are_computed_from_packed_stacks():
    experts, hidden, inner = 3, 128, 128
    gate_up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    x, shares = torch.randn(5, hidden).bfloat16(), torch.rand(5, 2)
    ids = torch.randint(experts, (5, 2))
    packed = [bf12.pack(stack.bfloat16().flatten(0, 1)) for stack in (gate_up, down)]
    layer = ExpertsBF12(renormalize=True, num_experts=experts, intermediate_size=inner)
    got = layer.forward(x, shares, ids, *packed, None, None, None, act_func=None)
    want = ops.fused_moe(x, gate_up.bfloat16(), down.bfloat16(), shares, ids, 2, True)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-1)
    with pytest.raises(AssertionError, match="not packed"):
        layer.forward(x, shares, ids, *packed, gate_up, None, None, act_func=None)


def test_what_would_not_get_smaller_stays(tmp_path, caplog):
    folders.write(tmp_path / "m", tensors(spread=True))
    with caplog.at_level(logging.INFO, "dlinfer"):
        got, want = made(tmp_path / "m"), plain(tmp_path / "m")
    for name, layer in linear_layers(got).items():
        assert (type(layer.impl) is LinearBF12) == ("down_proj" not in name)
    path = "model.layers.0.mlp.down_proj"
    assert torch.equal(bits(got.get_submodule(path).weight), bits(want.get_submodule(path).weight))
    assert f"left {folders.LAYERS} as they are" in caplog.text


def test_of_a_weight_that_comes_twice_the_second_counts(tmp_path):
    folders.write(tmp_path / "m", tensors())
    layer = plain(tmp_path / "m").get_submodule("model.layers.0.mlp.gate_up_proj")
    first, second, other = (torch.randn(folders.INNER, folders.HIDDEN).bfloat16() for _ in range(3))
    weight = packing.Weight(layer, BF12())
    with torch.inference_mode():
        for part, numbers in ((0, first), (1, other), (0, second)):
            loader.load_weight(layer.weight, numbers, shard_id=part)
            assert weight.is_packed == (part == 1 or numbers is second)
    assert torch.equal(
        bf12.unpack(layer.weight, 2 * folders.INNER, folders.HIDDEN), torch.cat([second, other])
    )
    weight.end()
    with pytest.raises(RuntimeError):
        loader.load_weight(layer.weight, first, shard_id=0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_stay_and_are_told_of(tmp_path, dtype, caplog):
    folders.write(tmp_path / "m", tensors())
    with caplog.at_level(logging.WARNING, "dlinfer"):
        model = made(tmp_path / "m", dtype=dtype)
    assert caplog.text.count("packs only models in bfloat16") == 1
    assert dtype in caplog.text
    assert not any(type(one.impl) is LinearBF12 for one in linear_layers(model).values())
    assert type(model.lm_head) is BaseLinear


def test_a_quantised_checkpoint_stays_and_is_told_of(tmp_path, caplog):
    config = {"quant_method": "smooth_quant", "quant_dtype": "int8"}
    folders.write(tmp_path / "m", tensors(), quantization_config=config)
    with caplog.at_level(logging.WARNING, "dlinfer"):
        model = made(tmp_path / "m", device="meta")
    assert "already quantised (smooth_quant)" in caplog.text
    assert not hasattr(model, "packing")


def test_the_layout_of_plain_weights_is_nothing_to_packed_ones(tmp_path, monkeypatch):
    folders.write(tmp_path / "m", tensors())
    want = plain(tmp_path / "m")
    monkeypatch.setenv("DLINFER_LINEAR_USE_NN_LAYOUT", "1")
    got = made(tmp_path / "m")
    for name, theirs in linear_layers(want).items():
        ours = linear_layers(got)[name].get_unquantized_weight(torch.bfloat16)
        assert torch.equal(bits(ours), bits(theirs.weight))


@pytest.mark.parametrize("tied", [True, False])
def test_preflight_and_the_engine_count_packed_bytes(tmp_path, tied):
    found = tensors()
    if tied:
        del found["lm_head.weight"]
    folders.write(tmp_path / "m", found, tie_word_embeddings=tied)
    report = preflight(tmp_path / "m", "cpu", session_len=256, max_batch_size=2)
    assert report.memory is not None, report.refusals
    called = [one.op for one in report.ops]
    assert "linear_bf12" in called
    assert ("embedding_bf12" in called) == tied
    there = {one.data_ptr(): one.nbytes for one in made(tmp_path / "m").parameters()}
    exceptions = report.memory.weights - sum(there.values())
    assert -0.01 * report.memory.weights < exceptions <= 0
    stored = model_files.read(tmp_path / "m")
    largest = 2 * 2 * folders.INNER * folders.HIDDEN  # gate and up, whole until they are packed
    assert report.memory.mapped == model_files.largest_tensor(stored) + largest
    model = made(tmp_path / "m", device="meta")
    saved = model.packing.saved_bytes
    in_floats = {one.data_ptr(): one.nbytes for one in plain(tmp_path / "m").parameters()}
    assert saved == sum(in_floats.values()) - report.memory.weights
    assert model.packing.largest_weight == largest


def test_experts_stay(tmp_path):
    """Their joint weights are no linear layers; those beside them are packed, routers of few rows among them."""
    from examples.tiny_models.build import build

    build("mixtral", tmp_path / "m", dtype="bfloat16")
    config = json.loads((tmp_path / "m/config.json").read_text())
    got, want = made(tmp_path / "m"), plain(tmp_path / "m")
    kept = {name: one for name, one in got.named_parameters() if ".experts." in name}
    assert len(kept) == 2 * config["num_hidden_layers"]
    for name, weight in want.named_parameters():
        assert name not in kept or torch.equal(kept[name], weight)
    packed = [name for name, one in linear_layers(got).items() if type(one.impl) is LinearBF12]
    assert not [name for name in packed if "experts" in name]


def test_a_rank_packs_experts_of_which_it_copies_parts():
    """Gate and up of each expert are read whole, and a half of each is this rank's."""
    module: Any = nn.Module()
    parameter: Any = nn.Parameter(torch.empty(2, 128, 512, dtype=torch.bfloat16), requires_grad=False)

    def load(param: nn.Parameter, loaded: Tensor, expert_id: int, shard_id: str) -> None:
        begin = 64 * ("gate", "up").index(shard_id)
        param.data[expert_id, begin : begin + 64].copy_(loaded.chunk(2)[1])

    parameter.weight_loader, module.weight = load, parameter
    layer = SimpleNamespace(tp=2, num_experts=2, gate_up=module, down=nn.Module())
    (_, parts), (_, of_down) = packing._parts_of_experts(layer)
    assert (parts, of_down) == (4, 2)
    weight = packing.Weight(module, BF12(), parts)
    whole = torch.randn(2, 2, 128, 512).bfloat16()
    for expert in range(2):
        for number, shard in enumerate(("gate", "up")):
            assert not weight.is_packed
            parameter.weight_loader(parameter, whole[expert, number], expert_id=expert, shard_id=shard)
    assert weight.is_packed
    weight.unpack()
    assert torch.equal(parameter.data, whole[:, :, 64:].flatten(1, 2))
