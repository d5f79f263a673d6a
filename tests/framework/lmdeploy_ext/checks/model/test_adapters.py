"""Adapters that LMDeploy would serve as something else, or fail on half way, are refused by name."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from lmdeploy.pytorch.nn.linear import build_gateup_linear, build_o_proj
from safetensors.torch import save_file
from torch import nn

from dlinfer import settings
from dlinfer.errors import AdapterFolderError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model import adapters

LAYERS, IN, HALF, RANK = 2, 8, 6, 3
SIZES = {"gate_proj": (IN, HALF), "up_proj": (IN, HALF), "down_proj": (HALF, IN)}


def weights(targets=("gate_proj", "down_proj"), layers=range(LAYERS), rank=RANK):
    found = {}
    for layer in layers:
        for target in targets:
            key = f"base_model.model.model.layers.{layer}.mlp.{target}"
            inputs, outputs = SIZES[target]
            found[f"{key}.lora_A.weight"] = torch.ones(rank, inputs)
            found[f"{key}.lora_B.weight"] = torch.ones(outputs, rank)
    return found


def write(folder: Path, tensors=None, **config) -> str:
    """An adapter as PEFT saves it. config: changes of its configuration."""
    folder.mkdir(parents=True)
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["gate_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    save_file(weights() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return str(folder)


class LlamaForCausalLM(nn.Module):
    """As LMDeploy's: a class that is served, with gate and up merged."""

    packed_modules_mapping: ClassVar = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self):
        super().__init__()
        PytorchEngineConfig(device_type="cpu")
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for layer in self.model.layers:
            layer.mlp = nn.Module()
            layer.mlp.gate_up_proj = build_gateup_linear(IN, [HALF, HALF], bias=False, is_tp=False)
            layer.mlp.down_proj = build_o_proj(HALF, IN, bias=False, is_tp=False)
        self.lm_head = build_o_proj(IN, 10, bias=False, is_tp=False)
        self.norm = nn.LayerNorm(IN)


class PhimoeForCausalLM(LlamaForCausalLM):
    """A class on which adapters were never compared."""


CONFIGS = {
    "DoRA without magnitudes": (
        {"use_dora": True},
        "has lora_A, lora_B, not lora_A, lora_B, lora_magnitude_vector",
    ),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
    "biases": ({"bias": "all"}, "bias='all'"),
    "biases of B": ({"lora_bias": True}, "lora_bias=True"),
    "another rank by a pattern": ({"rank_pattern": {"gate_proj": 1}}, "do not have rank 1"),
    "no rank by a pattern": ({"rank_pattern": {"gate_proj": 0}}, "r=0"),
    "an alpha that is no number": (
        {"alpha_pattern": {"gate_proj": "1"}},
        "lora_alpha='1' for model.layers.0",
    ),
    "a list of patterns": ({"rank_pattern": ["gate_proj"]}, "rank_pattern=['gate_proj'], not an object"),
    "a pattern that is none": (
        {"alpha_pattern": {"gate_(": 1}},
        "alpha_pattern={'gate_(': 1}, not an object",
    ),
    "some layers": ({"layers_to_transform": [0]}, "layers_to_transform=[0]"),
    "not LoRA": ({"peft_type": "IA3"}, "peft_type='IA3'"),
    "a pattern": ({"target_modules": r".*_proj"}, "is a pattern"),
    "no modules": ({"target_modules": []}, "target_modules=[]"),
    "no rank": ({"r": 0}, "r=0"),
    "another rank": ({"r": 4}, "do not have rank 4"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_lmdeploy_would_pass_over(name, tmp_path):
    config, words = CONFIGS[name]
    with pytest.raises(AdapterFolderError, match=re.escape(words)) as caught:
        PytorchEngineConfig(device_type="cpu", adapters={"mine": write(tmp_path / "a", **config)})
    assert "the LoRA adapter 'mine'" in str(caught.value)
    assert "Next step: " in str(caught.value)


def remove(folder, name):
    (folder / name).unlink()


BROKEN = {
    "no folder": (lambda f: f.rename(f.with_name("elsewhere")), "there is no such folder"),
    "no config": (lambda f: remove(f, "adapter_config.json"), "it has no adapter_config.json"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "is not valid JSON"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "is not a JSON object"),
    "no weights": (lambda f: remove(f, "adapter_model.safetensors"), "it holds no weights"),
    "truncated": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(
            (f / "adapter_model.safetensors").read_bytes()[:-9]
        ),
        "adapter_model.safetensors is truncated or corrupt",
    ),
    "no pickle": (lambda f: (f / "adapter_model.bin").write_bytes(b"x"), "adapter_model.bin is truncated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_is_not_whole(name, tmp_path):
    change, words = BROKEN[name]
    path = write(tmp_path / "a")
    change(Path(path))
    with pytest.raises(AdapterFolderError, match=words):
        PytorchEngineConfig(device_type="cpu", adapters={"mine": path})


def test_adapters_set_later_are_looked_at_when_the_engine_starts(tmp_path):
    config = PytorchEngineConfig(device_type="cpu")
    config.adapters = {"mine": str(tmp_path / "nowhere")}
    with pytest.raises(AdapterFolderError, match="there is no such folder"):
        ConfigBuilder.update_engine_config(config)


def test_good_adapters_of_either_file(tmp_path):
    first, second = (
        write(tmp_path / "a"),
        write(tmp_path / "b", weights(["up_proj"]), target_modules=["up_proj"]),
    )
    pickled = Path(second, "adapter_model.bin")
    torch.save(weights(["up_proj"]), pickled)
    remove(Path(second), "adapter_model.safetensors")
    PytorchEngineConfig(device_type="cpu", adapters={"a": first, "b": second, "hub": "somebody/adapter"})
    adapters.check_model(LlamaForCausalLM(), {"a": first, "b": second})


def magnitudes(size=6):
    more = {
        f"base_model.model.model.layers.{n}.mlp.gate_proj.lora_magnitude_vector": torch.ones(size)
        for n in (0, 1)
    }
    return weights(["gate_proj"]) | more


TENSORS = {
    "DoRA that is not configured": (
        magnitudes(),
        "has lora_A, lora_B, lora_magnitude_vector, not lora_A, lora_B",
    ),
    "no LoRA": (
        {"base_model.model.lm_head.weight": torch.ones(2, 2)},
        "is not a LoRA weight of a linear layer",
    ),
    "half": (
        {k: v for k, v in weights().items() if not k.endswith("1.mlp.down_proj.lora_B.weight")},
        "has lora_A, not lora_A, lora_B",
    ),
    "none": ({}, "it has no tensors"),
    "another rank": (weights(rank=2), "do not have rank 3"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_weights_that_are_no_plain_lora(name, tmp_path):
    tensors, words = TENSORS[name]
    with pytest.raises(AdapterFolderError, match=words):
        adapters.check_folders({"mine": write(tmp_path / "a", tensors)})


DORA = {"use_dora": True, "target_modules": ["gate_proj"]}


def test_magnitudes_of_another_size(tmp_path):
    with pytest.raises(AdapterFolderError, match=re.escape("has magnitudes of size (7,), not (6,)")):
        adapters.check_folders({"mine": write(tmp_path / "a", magnitudes(7), **DORA)})


@pytest.mark.parametrize("is_packed", [False, True])
def test_dora_needs_the_weights_in_floats_on_one_rank(is_packed, tmp_path):
    path, model = write(tmp_path / "a", magnitudes(), **DORA), LlamaForCausalLM()
    adapters.check_model(model, {"mine": path})
    linear: Any = model.get_submodule("model.layers.1.mlp.gate_up_proj")
    if is_packed:
        linear.weight = nn.Parameter(torch.zeros(10, dtype=torch.uint8), requires_grad=False)
    else:
        linear.tp, linear.all_out_features = 2, [3, 3]
    with pytest.raises(AdapterFolderError, match=r"it uses DoRA, and model\.layers\.1"):
        adapters.check_model(model, {"mine": path})


def wide():
    return {k: torch.ones(RANK, IN + 1) if "gate_proj.lora_A" in k else v for k, v in weights().items()}


MISFITS = {
    "one layer": (
        weights(layers=range(1, 2)),
        {},
        "no weights for model.layers.0.mlp.down_proj (2 such modules)",
    ),
    "more layers": (weights(layers=range(3)), {}, "weights for model.layers.2.mlp.down_proj"),
    "another module": (
        weights(["gate_proj", "down_proj", "up_proj"]),
        {},
        "weights for model.layers.0.mlp.up_proj",
    ),
    "other sizes": (
        wide(),
        {},
        "A with 9 inputs and B with 6 outputs, but in the model it has 8 inputs and 6 outputs",
    ),
    "unknown": (None, {"target_modules": ["gate_proj", "down_proj", "c_attn"]}, "no module named 'c_attn'"),
    "the head": (
        None,
        {"target_modules": ["gate_proj", "down_proj", "lm_head"]},
        "no module named 'lm_head'",
    ),
    "no linear": (
        None,
        {"target_modules": ["gate_proj", "down_proj", "mlp"]},
        "not support LoRA on model.layers.0.mlp",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_an_adapter_of_another_model(name, tmp_path):
    tensors, config, words = MISFITS[name]
    path = write(tmp_path / "a", tensors, **config)
    adapters.check_folders({"mine": path})
    with pytest.raises(AdapterFolderError, match=re.escape(words)):
        adapters.check_model(LlamaForCausalLM(), {"mine": path})


def test_two_spellings_of_one_module(tmp_path):
    first = write(tmp_path / "a")
    second = write(
        tmp_path / "b", target_modules=["mlp.gate_proj", "layers.0.mlp.down_proj", "1.mlp.down_proj"]
    )
    adapters.check_model(LlamaForCausalLM(), {"a": first, "b": second})


def test_reserved_rows():
    """LMDeploy builds LoRA layers only where there is a dict of adapters."""
    assert PytorchEngineConfig(device_type="cpu").adapters is None
    with settings.override(cpu_adapter_rows=8):
        assert PytorchEngineConfig(device_type="cpu").adapters == {}
        with pytest.raises(UnsupportedFeatureError, match="tp=2 with DLINFER_CPU_ADAPTER_ROWS"):
            PytorchEngineConfig(device_type="cpu", tp=2)
        with (
            settings.override(cpu_batch_invariant=True),
            pytest.raises(UnsupportedFeatureError, match="ADAPTER_ROWS"),
        ):
            PytorchEngineConfig(device_type="cpu")
        adapters.check_model(LlamaForCausalLM(), {})
        with pytest.raises(
            UnsupportedFeatureError, match=r"a LoRA adapter on Phimoe.*unset DLINFER_CPU_ADAPTER_ROWS"
        ):
            adapters.check_model(PhimoeForCausalLM(), {})


@pytest.mark.parametrize("kind", ["quant_dtype", "fp8_dtype"])
def test_ranks_that_round_their_part_of_an_input(kind, tmp_path):
    """With W8A8 all ranks round by the largest value of the whole input, but not below an adapter."""
    model = LlamaForCausalLM()
    rows: Any = model.get_submodule("model.layers.1.mlp.down_proj")
    setattr(rows, kind, torch.int8)
    adapters.check_model(model, {"a": write(tmp_path / "one")})
    rows.tp = 2
    with pytest.raises(UnsupportedFeatureError, match="LoRA adapters on weights of 8 bits"):
        adapters.check_model(model, {"a": write(tmp_path / "a")})


def test_a_class_whose_tokens_were_not_compared(tmp_path):
    with pytest.raises(UnsupportedFeatureError, match="a LoRA adapter on PhimoeForCausalLM"):
        adapters.check_model(PhimoeForCausalLM(), {"a": write(tmp_path / "a")})


# --- ranks and scalings


class Deep(nn.Module):
    """Two layers of two modules, with the paths of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.q_proj = nn.Linear(8, 6, bias=False)
            layer.o_proj = nn.Linear(6, 8, bias=False)


PATTERNS = {
    "neither": {},
    "by name": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}},
    "by path": {"rank_pattern": {"model.layers.1.q_proj": 7}, "alpha_pattern": {"layers.0.o_proj": 0.5}},
    "by expression": {
        "rank_pattern": {r"layers\.\d\.q.*": 1, "q_proj": 5},
        "alpha_pattern": {".*[01].o_proj": 9},
    },
    "part of a name": {"rank_pattern": {"proj": 2, "_proj": 3}, "alpha_pattern": {"q": 3}},
    "from the start": {
        "rank_pattern": {r"^model.layers.0.o_proj": 6},
        "alpha_pattern": {r"^layers.0.o_proj": 6},
    },
}


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_ranks_and_scalings_are_those_of_peft(name, use_rslora, tmp_path):
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "o_proj"], "use_rslora": use_rslora} | PATTERNS[name]
    model = peft.get_peft_model(Deep(), peft.LoraConfig(r=4, lora_alpha=6, **options))
    model.save_pretrained(tmp_path)
    layers = adapters.Adapter("one", str(tmp_path)).layers()
    loaded = peft.PeftModel.from_pretrained(Deep(), tmp_path).base_model.model
    assert len(layers) == 4
    for path, layer in layers.items():
        module = loaded.get_submodule(path)
        sizes = module.r["default"], module.scaling["default"], module.in_features, module.out_features
        assert (layer.rank, layer.scaling, layer.inputs, layer.outputs) == sizes


# --- how an adapter was initialised: PEFT changes the model's own weights for some as it loads them


class Layers(nn.Module):
    """A model of one layer, always with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Linear(16, 12, bias=False)
        nn.init.normal_(self.down_proj.weight, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "init", [True, False, "gaussian", "orthogonal", "eva", "mica", "pissa", "pissa_niter_4", "olora"]
)
def test_an_adapter_is_served_only_where_peft_keeps_the_weights_of_the_model(init, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["down_proj"], init_lora_weights=init)
    peft.get_peft_model(Layers(), config).save_pretrained(tmp_path)
    layer = peft.PeftModel.from_pretrained(Layers(), tmp_path).base_model.model.down_proj
    if torch.equal(layer.base_layer.weight, Layers().down_proj.weight):
        assert adapters.Adapter("one", str(tmp_path)).targets() == {"down_proj"}
        return
    with pytest.raises(AdapterFolderError, match=f"init_lora_weights='{init}'.*merge_and_unload"):
        adapters.Adapter("one", str(tmp_path)).targets()


@pytest.mark.parametrize("init", ["corda", "loftq", "lora_ga", "something new"])
def test_an_unknown_way_of_initialising_is_refused(init, tmp_path):
    folder = write(tmp_path / "adapter", init_lora_weights=init)
    with pytest.raises(AdapterFolderError, match=f"init_lora_weights='{init}'"):
        adapters.Adapter("one", folder).targets()
