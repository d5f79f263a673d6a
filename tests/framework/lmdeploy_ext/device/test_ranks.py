"""Models on several devices: what is refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch import envs
from lmdeploy.pytorch.config import DistConfig

from dlinfer import settings
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model import config, tensor_parallel
from dlinfer.framework.lmdeploy_ext.device import ranks
from dlinfer.framework.lmdeploy_ext.ranks import ray_cluster
from examples.tiny_models.families import FAMILIES


@pytest.fixture
def cards(monkeypatch):
    """As if the CPU were a card: no graphs that span several, no adapters on several, and no ranks that Ray starts."""
    monkeypatch.setattr(tensor_parallel.devices, "shares_host", lambda device_type: False)
    monkeypatch.setattr(ranks, "graphs_are_served", lambda device_type: False)
    monkeypatch.setattr(ray_cluster, "is_served", lambda device_type: False)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "tp=2 in graph mode"),
        ({"eager_mode": True, "adapters": {"one": "folder"}}, "tp=2 with LoRA adapters"),
        ({"eager_mode": True, "distributed_executor_backend": "ray"}, "distributed_executor_backend='ray'"),
    ],
)
def test_options_that_were_not_compared(options, named, cards):
    with pytest.raises(UnsupportedFeatureError, match=named):
        PytorchEngineConfig(device_type="cpu", tp=2, **options)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("backend", [None, "mp", "ray"])
def test_two_ranks_are_served(backend, eager):
    config = PytorchEngineConfig(
        device_type="cpu", tp=2, eager_mode=eager, distributed_executor_backend=backend
    )
    assert config.tp == 2


@pytest.mark.parametrize(("tp", "name"), [(1, "ray"), (2, "uni")])
def test_an_executor_of_the_environment(tp, name, monkeypatch):
    monkeypatch.setattr(envs, "executor_backend", name)
    with pytest.raises(UnsupportedFeatureError, match=f"LMDEPLOY_EXECUTOR_BACKEND='{name}'"):
        PytorchEngineConfig(device_type="cpu", tp=tp)


def test_one_rank_needs_no_processes():
    with pytest.raises(UnsupportedFeatureError, match="distributed_executor_backend='mp'"):
        PytorchEngineConfig(device_type="cpu", distributed_executor_backend="mp")


SIZES = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA = {"architectures": ["LlamaForCausalLM"]}
AWQ: dict[str, Any] = {"quant_method": "awq", "group_size": 128}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def packed(name: str, config: dict[str, Any], **sizes: int) -> dict[str, Any]:
    return {"architectures": [name], "quantization_config": config} | SIZES | sizes


@pytest.mark.parametrize(
    ("config", "method", "named"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, None, "tp=2 of Gemma3ForCausalLM"),
        (packed("InternLM2ForCausalLM", BLOCKS), None, "InternLM2ForCausalLM quantised as fp8"),
        (packed("GemmaForCausalLM", {"quant_method": "smooth_quant"}), None, "GemmaForCausalLM quantised as"),
        (packed("MixtralForCausalLM", {"quant_method": "smooth_quant"}), None, "quantised as smooth_quant"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle", "speculative"),
    ],
)
def test_models_that_were_not_compared(config, method, named):
    with pytest.raises(UnsupportedFeatureError, match=named):
        tensor_parallel.check_model(config, 2, method)
    tensor_parallel.check_model(config, 1, method)


@pytest.mark.parametrize("name", ["GemmaForCausalLM", "Qwen2MoeForCausalLM"])
def test_weights_that_are_rounded_in_place(name: str) -> None:
    config = {"architectures": [name]} | SIZES
    with settings.override(cpu_weights="int8"):
        with pytest.raises(UnsupportedFeatureError, match=f"tp=2 of {name} with DLINFER_CPU_WEIGHTS=int8"):
            tensor_parallel.check_model(config, 2, None)
        tensor_parallel.check_model(config, 1, None)
        tensor_parallel.check_model(LLAMA | SIZES, 2, None)
    with settings.override(cpu_weights="bf12"):
        tensor_parallel.check_model(config, 2, None)


@pytest.mark.parametrize(
    ("tp", "config", "named"),
    [
        (3, LLAMA | SIZES, "tp=3 of a model with num_attention_heads = 32 and num_key_value_heads = 8"),
        (16, LLAMA | SIZES | {"num_key_value_heads": 6}, "num_key_value_heads = 6"),
        (4, LLAMA | SIZES | {"intermediate_size": 1022}, "intermediate_size = 1022 "),
        (8, packed("LlamaForCausalLM", AWQ, intermediate_size=11008), "11008; .* a multiple of 128"),
        (
            2,
            packed("Qwen2ForCausalLM", AWQ, num_attention_heads=14, num_key_value_heads=2, hidden_size=896),
            "num_attention_heads . head_dim = 896; .* a multiple of 128",
        ),
        (
            2,
            packed("LlamaForCausalLM", BLOCKS, num_key_value_heads=2, head_dim=64),
            "head_dim = 128; each rank",
        ),
        (
            2,
            packed("Qwen3MoeForCausalLM", BLOCKS, moe_intermediate_size=1408),
            "moe_intermediate_size = 1408",
        ),
        (2, packed("Qwen2MoeForCausalLM", AWQ, shared_expert_intermediate_size=5504), "5504; each rank"),
    ],
)
def test_parts_of_heads_groups_and_blocks(tp, config, named):
    with pytest.raises(UnsupportedFeatureError, match=named):
        tensor_parallel.check_model(config, tp, None)


@pytest.mark.parametrize(
    ("tp", "config"),
    [
        (4, LLAMA | SIZES | {"num_key_value_heads": 2}),  # two ranks have the same head of k and v
        (8, packed("LlamaForCausalLM", AWQ)),
        (4, packed("Qwen2ForCausalLM", AWQ, num_key_value_heads=2)),
        (
            2,
            packed("LlamaForCausalLM", AWQ, num_key_value_heads=2, head_dim=64),
        ),  # halves of groups of outputs
        (8, packed("LlamaForCausalLM", {"quant_method": "fp8"}, intermediate_size=11008)),  # one scale in all
    ],
)
def test_whole_parts(tp, config):
    tensor_parallel.check_model(config, tp, None)


def test_the_families_of_the_matrix_are_served():
    assert len(tensor_parallel.COMPARED) >= len(FAMILIES)
    for name in tensor_parallel.COMPARED:
        tensor_parallel.check_model({"architectures": [name]}, 2, None)
    for method, names in tensor_parallel.COMPARED_PACKED.items():
        for name in names:
            tensor_parallel.check_model(packed(name, {"quant_method": method}), 2, None)


def test_ranks_are_found_where_lmdeploy_gives_them():
    PytorchEngineConfig(device_type="cpu")
    read = config.from_hf_config.build(lambda *_: pytest.fail("it was let through"))
    gemma = SimpleNamespace(model_type="gemma", to_dict=lambda: {"architectures": ["Gemma3ForCausalLM"]})
    for args, kwargs in (
        (("path", "auto", DistConfig(tp=2)), {}),
        (("path",), {"dist_config": DistConfig(tp=2), "device_type": "cpu"}),
    ):
        with pytest.raises(UnsupportedFeatureError, match="tp=2"):
            read(None, gemma, *args, **kwargs)
