"""Refuses LoRA adapters that do not fit the model, once its layers are built and before weights load.

LMDeploy allocates A and B for every layer that has a module of a target's name, and never checks whether the adapter
filled them. It does not know either where a model class permutes or splits weights as it loads them, so adapters are
served on the classes whose tokens were compared with PEFT's.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.checks.folder.adapter import Adapter, adapters_of, check_folders
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.patching import Original, replaces

_NAMED = {
    "Qwen2VLForConditionalGeneration": ("model.language_model.", "model."),
    "Qwen2_5_VLForConditionalGeneration": ("model.language_model.", "model."),
}
"""LMDeploy's model class -> how modules' paths begin in transformers 5, and how in LMDeploy as in transformers 4."""

SERVED = _NAMED.keys() | {
    f"{name}ForCausalLM" for name in "Gemma Llama Mistral Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe".split()
}
"""LMDeploy's model classes whose tokens with adapters were compared with PEFT's."""

_OTHER = "use an adapter that was trained for this model"

_asked: ContextVar[Mapping[str, str] | None] = ContextVar("adapters", default=None)
"""The adapters of the model that is being built."""


def check_model(model: torch.nn.Module, adapters: Mapping[str, str]) -> None:
    """Raise UnsupportedFeatureError for a model's class, AdapterFolderError for an adapter that does not fit the model.

    model: LMDeploy's, with or without weights. adapters: name -> folder.
    """
    served = type(model).__name__
    if served not in SERVED:
        advice = "merge the adapter into the model (PEFT's merge_and_unload)"
        raise refuse(f"a LoRA adapter on {served}", advice)
    spelled: dict[str, str] = {}
    for adapter in adapters_of(adapters):
        modules: dict[str, tuple[int, int]] = {}
        for target in sorted(adapter.targets()):
            last = target.rpartition(".")[2]
            if spelled.setdefault(last, target) != target:
                detail = f"target_modules has {target!r}, and {spelled[last]!r} is asked for, too"
                raise adapter.fault(detail, f"name it alike, {last!r}, in all adapter_config.json")
            modules |= _modules(model, target, adapter)
        _compare(model, modules, adapter)


def _path(model: torch.nn.Module, module: str) -> str:
    """A module's path in LMDeploy's model, from its path in transformers'."""
    now, before = _NAMED.get(type(model).__name__, ("", ""))
    return before + module.removeprefix(now) if now and module.startswith(now) else module


def _modules(model: torch.nn.Module, target: str, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Path in the model -> (in_features, out_features) of every module that a target names."""
    from lmdeploy.pytorch.adapter.adapter import find_all_target
    from lmdeploy.pytorch.nn.linear.base import LinearBase

    last = target.rpartition(".")[2]
    targets, part = find_all_target(model, last)
    if not targets:
        detail = f"{type(model).__name__} has no module named {target!r}, which target_modules asks for"
        raise adapter.fault(detail, _OTHER)
    modules: dict[str, tuple[int, int]] = {}
    for where, module in targets:
        if not isinstance(module, LinearBase) or ".layers." not in where:
            raise adapter.fault(f"LMDeploy serves no LoRA on {where}", f"leave {target!r} out")
        linear: Any = module  # classes of linear layers have these fields of their own
        outputs = linear.out_features if part is None else linear.all_out_features[part]
        modules[f"{where.rpartition('.')[0]}.{last}"] = (linear.in_features, outputs)
    return modules


def _compare(model: torch.nn.Module, modules: Mapping[str, tuple[int, int]], adapter: Adapter) -> None:
    stored = {_path(model, module): sizes for module, sizes in adapter.sizes().items()}
    for module, (a, b) in stored.items():
        if module not in modules:
            detail = f"it has weights of {module}, which target_modules and the model do not"
            raise adapter.fault(detail, _OTHER)
        inputs, outputs = modules[module]
        if (a[1], b[0]) != (inputs, outputs):
            detail = f"{module} has A of {a} and B of {b}, where the model's has {inputs} inputs and {outputs} outputs"
            raise adapter.fault(detail, _OTHER)
    if missing := sorted(modules.keys() - stored.keys()):
        detail = f"it has no weights of {missing[0]} ({len(missing)} such modules), whose memory LMDeploy does not fill"
        raise adapter.fault(detail, "use an adapter of all layers, or merge it into the model")


def check_asked(model: Any) -> None:
    """Raise AdapterFolderError where one of the engine's adapters does not fit the model, which is being built."""
    if adapters := _asked.get():
        check_folders(adapters)  # those of a hub are fetched by now
        check_model(model, adapters)


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._build_model",
    why="builds a model, loads its weights and then the adapters, without a look at them",
    when=activation.is_on,
)
def build_model(original: Original, self: Any) -> None:
    token = _asked.set(self.adapters)
    try:
        original(self)
    finally:
        _asked.reset(token)


@replaces(
    "lmdeploy.pytorch.adapter.adapter:load_lora_weights",
    why="knows the weights of vision-language models by the names of transformers 4 alone",
    when=activation.is_on,
)
def load_lora_weights(
    original: Original,
    model: torch.nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    adapter_id: int,
) -> None:
    begin = "base_model.model."
    renamed = [(begin + _path(model, name.removeprefix(begin)), weight) for name, weight in weights]
    original(model, renamed, adapter_id)
