"""LoRA adapters against PEFT: mixed batches, ranks, scalings; what is refused; loading and dropping while serving."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dlinfer.framework.mindie_ext import GeneratorTorch
from dlinfer.framework.mindie_ext.errors import AdapterError
from tests.e2e.harness import Lab
from tests.framework.mindie_ext.generators import Blocks, config_of, run

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "narrow": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "wide": {"r": 8, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "patterned": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["o_proj", "down_proj"],
        "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {"down_proj": 3},
    },
}
PROMPTS = [[5, 17, 33, 60], [9, 8], [100, 200, 300, 400, 500, 600, 700, 800, 21, 22, 23], [44]]


@pytest.fixture(scope="module")
def saved(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of a tiny Llama, as PEFT saves them, with numbers large enough to change tokens."""
    folders = {}
    for name, config in CONFIGS.items():
        base = AutoModelForCausalLM.from_pretrained(lab.model("llama"))
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
        generator = torch.Generator().manual_seed(len(name))
        for key, tensor in model.named_parameters():
            if "lora_" in key:
                tensor.data = torch.randn(tensor.shape, generator=generator) * 0.4
        folders[name] = tmp_path_factory.mktemp("adapters") / name
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def expected(lab: Lab, saved: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Greedy tokens of each adapter, and of the model itself, for each prompt; by PEFT."""
    tokens = {}
    for name in ("base", *CONFIGS):
        model: Any = AutoModelForCausalLM.from_pretrained(lab.model("llama")).eval()
        if name != "base":
            model = PeftModel.from_pretrained(model, str(saved[name])).eval()
        tokens[name] = [greedy(model, prompt, 12) for prompt in PROMPTS]
    return tokens


@torch.no_grad()
def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def serving(lab: Lab, **changes: Any) -> GeneratorTorch:
    return GeneratorTorch(config_of(lab.model("llama"), **({"max_loras": 3, "max_lora_rank": 8} | changes)))


def tokens_of(generator: GeneratorTorch, adapters: Sequence[str | None]) -> list[list[int]]:
    blocks = Blocks(16)
    requests = [
        blocks.request(number, prompt, 12, adapter_id=adapter)
        for number, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True))
    ]
    return run(generator, requests)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_mixed_batch_gives_what_peft_gives(
    lab: Lab, saved: dict[str, Path], expected: dict[str, list[list[int]]], graph: bool
) -> None:
    generator = serving(lab)
    for name, folder in saved.items():
        generator.load_lora(name, str(folder))
    if graph:
        generator.warm_up()
    compiled = len(generator.model_wrapper.compiled.compilations)
    for adapters in (
        ["narrow", "wide", None, "patterned"],
        ["wide", "wide", "wide", "wide"],
        [None, None, "base", "None"],
        ["patterned", None, "narrow", "wide"],
    ):
        names = ["base" if one in (None, "None") else one for one in adapters]
        assert tokens_of(generator, adapters) == [expected[name][row] for row, name in enumerate(names)]
    different = {str(expected[name][2]) for name in expected}
    assert len(different) == len(expected), "adapters that change no token prove nothing"
    assert len(generator.model_wrapper.compiled.compilations) == compiled


def test_adapters_come_and_go_without_compilation(
    lab: Lab, saved: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    """With one place: each in turn. The layers that the widest needs stay, so the graphs stay."""
    generator = serving(lab, max_loras=1)
    generator.load_lora("wide", str(saved["wide"]))
    generator.warm_up()
    for name in ("wide", "narrow", "patterned", "wide"):
        assert tokens_of(generator, [name] * 4) == expected[name]
        generator.unload_lora(name)
        assert tokens_of(generator, [None] * 4) == expected["base"]
        following = {"wide": "narrow", "narrow": "patterned", "patterned": "wide"}[name]
        generator.load_lora(following, str(saved[following]))
    assert [phase for phase, _ in generator.model_wrapper.compiled.compilations] == ["prefill", "decode"]


def test_an_adapter_for_layers_that_had_none_is_served_by_new_graphs(
    lab: Lab, saved: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    generator = serving(lab)
    generator.warm_up()
    assert tokens_of(generator, [None] * 4) == expected["base"]
    generator.load_lora("narrow", str(saved["narrow"]))
    assert tokens_of(generator, ["narrow"] * 4) == expected["narrow"]
    assert len(generator.model_wrapper.compiled.compilations) == 4


def test_weights_are_not_copied_or_renamed_for_the_base(lab: Lab, saved: dict[str, Path]) -> None:
    generator = serving(lab)
    model = generator.model_wrapper.compiled.model
    before = {tensor.data_ptr() for tensor in model.parameters()}
    generator.load_lora("wide", str(saved["wide"]))
    assert {tensor.data_ptr() for tensor in model.parameters()} == before


def broken(saved: dict[str, Path], folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A copy of an adapter with other entries; None leaves one out."""
    folder.mkdir()
    source = saved["narrow"]
    content = json.loads((source / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(content))
    merged = load_file(source / "adapter_model.safetensors") | tensors
    save_file(
        {key: one for key, one in merged.items() if one is not None}, folder / "adapter_model.safetensors"
    )
    return folder


_Q = "base_model.model.model.layers.0.self_attn.q_proj"
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, {}, "peft_type"),
    "biases": ({"bias": "all"}, {}, "bias"),
    "DoRA": ({"use_dora": True}, {}, "use_dora"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    "transposed": ({"fan_in_fan_out": True}, {}, "fan_in_fan_out"),
    "an unknown module": (
        {},
        {
            "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 64),
            "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": torch.zeros(128, 4),
        },
        "layers.9",
    ),
    "a module that is no linear layer": (
        {},
        {
            "base_model.model.model.norm.lora_A.weight": torch.zeros(4, 64),
            "base_model.model.model.norm.lora_B.weight": torch.zeros(64, 4),
        },
        "LlamaRMSNorm",
    ),
    "half of a pair": ({}, {f"{_Q}.lora_B.weight": None}, "only one"),
    "sizes of another model": (
        {},
        {f"{_Q}.lora_A.weight": torch.zeros(4, 48), f"{_Q}.lora_B.weight": torch.zeros(64, 4)},
        "64 inputs",
    ),
    "a rank too large": (
        {},
        {f"{_Q}.lora_A.weight": torch.zeros(9, 64), f"{_Q}.lora_B.weight": torch.zeros(64, 9)},
        "rank 9",
    ),
    "A and B of different ranks": ({}, {f"{_Q}.lora_A.weight": torch.zeros(3, 64)}, "do not fit"),
    "a strange tensor": ({}, {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "lm_head"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_adapter_is_refused_and_changes_nothing(
    lab: Lab, saved: dict[str, Path], expected: dict[str, list[list[int]]], tmp_path: Path, case: str
) -> None:
    config, tensors, named = BROKEN[case]
    generator = serving(lab)
    kinds = [type(module) for module in generator.model_wrapper.compiled.model.modules()]
    with pytest.raises(AdapterError, match=named):
        generator.load_lora("broken", str(broken(saved, tmp_path / "broken", config, tensors)))
    assert generator.adapter_manager.names == []
    assert [type(module) for module in generator.model_wrapper.compiled.model.modules()] == kinds


def test_files_that_are_missing_or_corrupt(lab: Lab, saved: dict[str, Path], tmp_path: Path) -> None:
    generator = serving(lab)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        generator.load_lora("one", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="not JSON"):
        generator.load_lora("one", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text((saved["narrow"] / "adapter_config.json").read_text())
    with pytest.raises(AdapterError, match="safetensors"):
        generator.load_lora("one", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(AdapterError, match="corrupt"):
        generator.load_lora("one", str(tmp_path))


def test_names_and_places(lab: Lab, saved: dict[str, Path]) -> None:
    generator = serving(lab, max_loras=1)
    generator.load_lora("one", str(saved["narrow"]))
    with pytest.raises(AdapterError, match="already loaded"):
        generator.load_lora("one", str(saved["narrow"]))
    with pytest.raises(AdapterError, match="adapters are already loaded"):
        generator.load_lora("two", str(saved["wide"]))
    with pytest.raises(AdapterError, match="not valid"):
        generator.load_lora("base", str(saved["wide"]))
    with pytest.raises(AdapterError, match="not loaded"):
        generator.unload_lora("two")
    with pytest.raises(AdapterError, match="not loaded"):
        tokens_of(generator, ["two", None, None, None])
    with pytest.raises(AdapterError, match="expected one adapter, given 2"):
        generator.adapter_manager.load_adapter({"a": "x", "b": "y"})
    with pytest.raises(AdapterError, match="adapters are already loaded"):
        serving(lab, max_loras=0, max_lora_rank=0).load_lora("one", str(saved["narrow"]))
