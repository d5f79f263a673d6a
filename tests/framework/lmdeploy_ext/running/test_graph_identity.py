"""A stored graph is found again for the model that it was compiled from, and for no other."""

import copy
import dataclasses
import enum
import functools
from typing import Any

import numpy
import pytest
import torch
from lmdeploy.messages import QuantPolicy
from lmdeploy.pytorch import envs
from lmdeploy.pytorch.config import (
    BackendConfig,
    CacheConfig,
    DistConfig,
    DLLMConfig,
    ModelConfig,
    QuantizationConfig,
    StateCacheSpec,
)
from lmdeploy.pytorch.model_inputs import BuildModelContext, SpecModelBuildContext
from transformers import LlamaConfig, PreTrainedConfig

from dlinfer.framework.lmdeploy_ext.running.graph_identity import LEFT_OUT, model_identity


def build_context() -> BuildModelContext:
    return BuildModelContext(dllm_config=DLLMConfig())


def model_config() -> ModelConfig:
    return ModelConfig(
        hidden_size=64,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=[2],
        head_dim=16,
        hf_config=LlamaConfig(),
        dist_config=DistConfig(),
        quant_config=QuantizationConfig(),
        state_cache_specs=[StateCacheSpec("state", (1, 2), torch.float32)],
    )


def contexts() -> dict[str, Any]:
    return {
        "build_context": build_context(),
        "model_config": model_config(),
        "cache_config": CacheConfig(max_batches=8, block_size=64, num_cpu_blocks=0, num_gpu_blocks=16),
        "backend_config": BackendConfig(),
    }


MODEL = torch.nn.Linear(2, 2)

# Where each of LMDeploy's dataclasses stands in the contexts.
PLACES = {
    BuildModelContext: "build_context",
    DLLMConfig: "build_context.dllm_config",
    SpecModelBuildContext: "build_context.spec_model_ctx",
    ModelConfig: "model_config",
    DistConfig: "model_config.dist_config",
    QuantizationConfig: "model_config.quant_config",
    StateCacheSpec: "model_config.state_cache_specs.0",
    CacheConfig: "cache_config",
    BackendConfig: "backend_config",
}
FIELDS = [
    pytest.param(place, cls, field.name, id=f"{cls.__name__}.{field.name}")
    for cls, place in PLACES.items()
    for field in dataclasses.fields(cls)
]


def identity(given: dict[str, Any], model: torch.nn.Module = MODEL) -> str:
    return model_identity(model, **given)


def at(given: dict[str, Any], place: str) -> Any:
    found: Any = given
    for step in place.split("."):
        found = (
            found[step]
            if isinstance(found, dict)
            else found[int(step)]
            if step.isdigit()
            else getattr(found, step)
        )
    return found


def another(value: Any) -> Any:
    """A value of the same kind that is not equal to it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return "another" if value is None else None


@pytest.mark.parametrize(("place", "cls", "field"), FIELDS)
def test_any_field_that_differs_is_another_identity(place: str, cls: type, field: str):
    one, other = contexts(), contexts()
    owner = at(other, place)
    object.__setattr__(owner, field, another(getattr(owner, field)))
    assert (identity(one) == identity(other)) is (field in LEFT_OUT.get(cls.__name__, {}))


def test_every_field_that_is_left_out_is_there():
    """A field that a later release renames or drops would stay in the list for nothing."""
    known = {cls.__name__: {field.name for field in dataclasses.fields(cls)} for cls in PLACES}
    known["envs"] = set(vars(envs))
    known[PreTrainedConfig.__name__] = {"_name_or_path", "_commit_hash"}
    for name, fields in LEFT_OUT.items():
        assert set(fields) <= known[name], name
        assert all(fields.values()), name


def test_a_field_that_lmdeploy_adds_counts():
    @dataclasses.dataclass
    class Next(BuildModelContext):
        added: bool = False

    assert identity({"build_context": Next()}) != identity({"build_context": Next(added=True)})
    one, other = contexts(), contexts()
    other["model_config"].set_later = 1  # as LMDeploy sets ModelConfig.block_size
    assert identity(one) != identity(other)


@pytest.mark.parametrize("name", ["rope_parameters", "hidden_act", "some_remote_code_field"])
def test_every_field_of_the_checkpoints_configuration_counts(name: str):
    one, other = contexts(), contexts()
    vars(other["model_config"].hf_config)[name] = "another"  # past the checks of transformers
    assert identity(one) != identity(other)


def test_equal_models_in_two_folders_share_graphs():
    one, other = contexts(), contexts()
    one["model_config"].hf_config._name_or_path = "/models/here"
    other["model_config"].hf_config._name_or_path = "/models/there"
    assert identity(one) == identity(copy.deepcopy(one)) == identity(other)


def test_an_environment_variable_that_chooses_a_layers_code_counts(monkeypatch: pytest.MonkeyPatch):
    before = identity({})
    monkeypatch.setattr(envs, "hy3_shared_expert_overlap", not envs.hy3_shared_expert_overlap)
    assert identity({}) != before


def test_weights_count_by_layout_and_not_by_value():
    assert identity({}, torch.nn.Linear(2, 2)) == identity({})
    assert identity({}, torch.nn.Linear(2, 3)) != identity({})
    transposed = torch.nn.Linear(2, 2)
    transposed.weight.data = transposed.weight.data.t()
    assert identity({}, transposed) != identity({})


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ("1", 1),
        ([1], (1,)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": 1, "b": None}),
        ({1: "a"}, {"1": "a"}),
        ({1, 2}, {1, 3}),
        (torch.float16, torch.bfloat16),
        (QuantPolicy.NONE, 0),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.tensor(1.0), torch.tensor([1.0])),
        (numpy.zeros(2), numpy.ones(2)),
        (Slotted(1), Slotted(2)),
    ],
    ids=lambda value: "Slotted" if isinstance(value, Slotted) else str(value),
)
def test_values_that_differ_are_told_apart(one: Any, other: Any):
    assert identity({"value": one}) == identity({"value": copy.deepcopy(one)})
    assert identity({"value": one}) != identity({"value": other})


def test_a_structure_that_holds_itself_is_described():
    one: dict[str, Any] = {"a": 1}
    one["self"] = one
    assert identity(one) == identity(one)


def test_what_cannot_be_looked_into_is_never_the_same(caplog: pytest.LogCaptureFixture):
    opaque = iter([1, 2])  # Python shows nothing of what it holds
    assert identity({"value": opaque}) != identity({"value": opaque})
    assert "value" in caplog.text
