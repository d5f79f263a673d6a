"""Refuses LoRA adapters that LMDeploy would serve wrongly. Checks the adapter's folder first, later the built model.

LMDeploy has three faults here. It reads only target modules, rank and alpha from PEFT's configuration, and ignores all
other options. It allocates A and B for each layer with a target module, and never checks whether the adapter has values
for them. And it ignores that some model classes permute or split weights while loading. So we serve adapters only on
model classes that generated the same tokens as PEFT in a test. The checks read names and sizes of weights, not their
values.
"""

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import AdapterFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import looks_like_path, names_in
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.patching import Original, replaces

# Key of adapter_config.json -> the values that LMDeploy may ignore.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # With other values (PiSSA, OLoRA, CorDA, LoftQ) PEFT changes the model's own weights when it loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    "bias": ("none", None),
}
_PLAIN |= dict.fromkeys(
    "use_dora use_rslora use_qalora use_bdlora lora_bias fan_in_fan_out".split(), (None, False)
)
_PLAIN |= dict.fromkeys(
    "modules_to_save rank_pattern alpha_pattern layers_to_transform layer_replication target_parameters "
    "trainable_token_indices alora_invocation_tokens arrow_config kasa_config monteclora_config velora_config".split(),
    (None, [], {}),
)
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_CONFIG = "adapter_config.json"
# LMDeploy looks for these files in this order.
_WEIGHTS = ("adapter_model.bin", "adapter_model.safetensors")
_AGAIN = "give the complete folder that PEFT's save_pretrained wrote"
_RETRAIN = "merge the adapter into the model (PEFT's merge_and_unload), or use a plain LoRA adapter"


_NAMED = {
    "Qwen2VLForConditionalGeneration": ("model.language_model.", "model."),
    "Qwen2_5_VLForConditionalGeneration": ("model.language_model.", "model."),
}
"""LMDeploy's model class -> (prefix of module paths in transformers 5, prefix in LMDeploy and transformers 4)."""

SERVED = _NAMED.keys() | {
    f"{name}ForCausalLM" for name in "Gemma Llama Mistral Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe".split()
}
"""LMDeploy's model classes that we serve with adapters, because they generated the same tokens as PEFT in a test."""

_OTHER = "use an adapter that was trained for this model"

_asked: ContextVar[Mapping[str, str] | None] = ContextVar("adapters", default=None)
"""The adapters of the model that is being built: name -> folder."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of an engine: its name and its folder."""

    name: str
    path: str

    def fault(self, detail: str, advice: str = _AGAIN) -> AdapterFolderError:
        return AdapterFolderError(name=self.name, path=self.path, detail=detail, advice=advice)

    def targets(self) -> set[str]:
        """Return the adapter's target_modules.

        Raises AdapterFolderError if its configuration has an option that LMDeploy ignores, or has an invalid rank,
        alpha or target_modules.
        """
        config = self._config()
        for key, plain in _PLAIN.items():
            if key in config and config[key] not in plain:
                raise self.fault(f"LMDeploy ignores {key}={config[key]!r} in its {_CONFIG}", _RETRAIN)
        rank, alpha, names = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise self.fault(
                f"its {_CONFIG} has r={rank!r} and lora_alpha={alpha!r}; r must be at least 1, and lora_alpha a number"
            )
        if isinstance(names, str):
            detail = f"target_modules={names!r} is a pattern, but LMDeploy supports only a list of names"
            raise self.fault(detail, f"replace the pattern in {_CONFIG} by a list of module names")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise self.fault(f"its {_CONFIG} has target_modules={names!r}, not a list of module names")
        return set(names)

    def sizes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the sizes of the adapter's weights: a dict from module path to (size of A, size of B).

        A is [rank, in], and B is [out, rank]. Raises AdapterFolderError in these cases:

        - A tensor is not a LoRA weight of a linear layer.
        - A module lacks A or B.
        - A or B does not have the configured rank.
        """
        rank = self._config().get("r")
        sides: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, size in self._tensors().items():
            match = _TENSOR.fullmatch(key)
            if match is None:
                raise self.fault(f"the tensor {key} is not a LoRA weight of a linear layer", _RETRAIN)
            sides.setdefault(match["module"], {})[match["side"]] = size
        if not sides:
            raise self.fault("it has no tensors")
        for module, tensors in sides.items():
            if tensors.keys() != {"A", "B"}:
                raise self.fault(f"{module} has only lora_{min(tensors)}")
            a, b = tensors["A"], tensors["B"]
            if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
                raise self.fault(
                    f"{module} has A of size {a} and B of size {b}, which do not have rank {rank}"
                )
        return {module: (tensors["A"], tensors["B"]) for module, tensors in sides.items()}

    def check_fit(self, model: torch.nn.Module, modules: Mapping[str, tuple[int, int]]) -> None:
        """Raise AdapterFolderError unless the adapter has weights for exactly ``modules``, and all in the right sizes.

        model: LMDeploy's model. modules: path in that model -> (in_features, out_features) of the target modules, from
        ``_modules``.
        """
        stored = {_path(model, module): sizes for module, sizes in self.sizes().items()}
        for module, (a, b) in stored.items():
            if module not in modules:
                detail = f"it has weights for {module}, but the model has no target module of this name"
                raise self.fault(detail, _OTHER)
            inputs, outputs = modules[module]
            if (a[1], b[0]) != (inputs, outputs):
                sizes = f"{module} has A of size {a} and B of size {b}"
                detail = f"{sizes}, but in the model it has {inputs} inputs and {outputs} outputs"
                raise self.fault(detail, _OTHER)
        if missing := sorted(modules.keys() - stored.keys()):
            of = f"{missing[0]} ({len(missing)} such modules)"
            detail = f"it has no weights for {of}, and LMDeploy would leave them uninitialised"
            raise self.fault(
                detail, "use an adapter with weights for all target modules, or merge it into the model"
            )

    def _config(self) -> dict[str, Any]:
        folder = Path(self.path)
        if not folder.is_dir():
            what = "it is a file, not a folder" if folder.exists() else "there is no such folder"
            raise self.fault(what)
        try:
            return model_files.read_json(folder / _CONFIG)
        except FileNotFoundError:
            raise self.fault(f"it has no {_CONFIG}") from None
        except ValueError as error:
            raise self.fault(str(error)) from None

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        file = next((file for file in _WEIGHTS if Path(self.path, file).is_file()), None)
        if file is None:
            raise self.fault(f"it holds no weights (none of {', '.join(_WEIGHTS)})")
        path = Path(self.path, file)
        try:
            names_in(path)  # compares the header with the length of the file
            return {key: tuple(tensor.shape) for key, tensor in model_files.empty_tensors(path)}
        except Exception as error:  # noqa: BLE001 - a file that is not whole fails in many ways
            raise self.fault(f"{file} is truncated or corrupt ({in_short(error)})") from None


def check_folders(folders: Mapping[str, str] | None) -> None:
    """Raise AdapterFolderError for the first adapter that cannot be served on any model.

    folders: adapter name -> folder or hub id. This function skips hub ids. ``check_asked`` checks them after the
    download.
    """
    for adapter in starmap(Adapter, (folders or {}).items()):
        if Path(adapter.path).exists() or looks_like_path(str(adapter.path)):
            adapter.targets()
            adapter.sizes()


def check_model(model: torch.nn.Module, adapters: Mapping[str, str]) -> None:
    """Raise UnsupportedFeatureError unless the model's class is in ``SERVED``.

    Raises AdapterFolderError if an adapter's weights do not match the model's layers.
    model: LMDeploy's model; its weights need not be loaded. adapters: adapter name -> folder.
    """
    served = type(model).__name__
    if served not in SERVED:
        advice = "merge the adapter into the model (PEFT's merge_and_unload)"
        raise refuse(f"a LoRA adapter on {served}", advice)
    # In W8A8 ranks would quantise their part of an input alone, unlike without adapters. FP8 was never compared.
    splits = (layer for layer in model.modules() if getattr(layer, "tp", 1) > 1)
    if any(hasattr(layer, name) for layer in splits for name in ("quant_dtype", "fp8_dtype")):
        raise refuse("tp > 1 with LoRA adapters on weights of 8 bits", "use unquantised weights, or tp=1")
    spelled: dict[str, str] = {}
    for adapter in starmap(Adapter, adapters.items()):
        modules: dict[str, tuple[int, int]] = {}
        for target in sorted(adapter.targets()):
            last = target.rpartition(".")[2]
            if spelled.setdefault(last, target) != target:
                detail = f"target_modules has {target!r}, but {spelled[last]!r} is already used for the same modules"
                raise adapter.fault(detail, f"write {last!r} in every adapter_config.json")
            modules |= _modules(model, target, adapter)
        adapter.check_fit(model, modules)


def _path(model: torch.nn.Module, module: str) -> str:
    """Return a module's path in LMDeploy's model. module: its path in transformers' model, which adapter files use."""
    now, before = _NAMED.get(type(model).__name__, ("", ""))
    return before + module.removeprefix(now) if now and module.startswith(now) else module


def _modules(model: torch.nn.Module, target: str, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Return the sizes of each module that ``target`` names: a dict from path to (in_features, out_features).

    model: LMDeploy's model; the paths are those in this model. target: one of the adapter's target_modules. Raises
    AdapterFolderError if ``target`` names no module, or a module that does not support LoRA in LMDeploy.
    """
    from lmdeploy.pytorch.adapter.adapter import find_all_target
    from lmdeploy.pytorch.nn.linear.base import LinearBase

    last = target.rpartition(".")[2]
    targets, part = find_all_target(model, last)
    if not targets:
        detail = f"{type(model).__name__} has no module named {target!r}, which target_modules names"
        raise adapter.fault(detail, _OTHER)
    modules: dict[str, tuple[int, int]] = {}
    for where, module in targets:
        if not isinstance(module, LinearBase) or ".layers." not in where:
            raise adapter.fault(
                f"LMDeploy does not support LoRA on {where}",
                f"use an adapter without {target!r} in target_modules",
            )
        modules[f"{where.rpartition('.')[0]}.{last}"] = _sizes(module, part)
    return modules


def _sizes(linear: Any, part: int | None) -> tuple[int, int]:
    """Return in_features and out_features over all ranks. part: the index of the module in a joined layer, or None."""
    outputs = linear.out_features if part is None else linear.all_out_features[part]
    if not linear.colwise:
        return linear.in_features * linear.tp, outputs
    # With fewer heads of k and v (parts 1 and 2 of q, k and v) than ranks, ranks share a head.
    copies = getattr(linear, "num_replicate_kv_heads", 1) if part else 1
    return linear.in_features, outputs * linear.tp // copies


def check_asked(model: Any) -> None:
    """Raise an error if one of the engine's adapters cannot be served on ``model``, which LMDeploy is building.

    This raises the errors of ``check_folders`` and ``check_model``.
    """
    if adapters := _asked.get():
        check_folders(adapters)  # adapters from a hub are downloaded by now
        check_model(model, adapters)


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._build_model",
    why="loads the weights and then the adapters, and never checks that the adapters fit the model",
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
    why="knows the weights of vision-language models only by their names in transformers 4",
    when=activation.is_on,
)
def load_lora_weights(
    original: Original, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], adapter_id: int
) -> None:
    begin = "base_model.model."
    renamed = [(begin + _path(model, name.removeprefix(begin)), weight) for name, weight in weights]
    original(model, renamed, adapter_id)
