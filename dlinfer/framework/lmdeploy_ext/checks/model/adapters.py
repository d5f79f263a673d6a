"""Refuses LoRA adapters that would be served wrongly. Checks the adapter's folder first, later the built model.

LMDeploy has two faults here. It ignores most options of PEFT's configuration. And it ignores that some model classes
permute or split weights while loading. So we serve adapters only on model classes that generated the same tokens as
PEFT in a test. The checks read names and sizes of weights, not their values.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import AdapterFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import looks_like_path, names_in
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.patching import Original, replaces

# Key of adapter_config.json -> the values that may be ignored.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # With other values (PiSSA, OLoRA, CorDA, LoftQ) PEFT changes the model's own weights when it loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    "bias": ("none", None),
}
_PLAIN |= dict.fromkeys("use_qalora use_bdlora lora_bias fan_in_fan_out".split(), (None, False))
_PLAIN |= dict.fromkeys(
    "modules_to_save layers_to_transform layer_replication target_parameters "
    "trainable_token_indices alora_invocation_tokens arrow_config kasa_config monteclora_config velora_config".split(),
    (None, [], {}),
)
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_((?P<side>[AB])\.weight|magnitude_vector(\.weight)?)"
)
MAGNITUDES = "magnitude_vector"
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

_MERGED = {"Phi3ForCausalLM"}
"""LMDeploy's model classes whose merged layers are merged in transformers, too."""

_UNSET = "unset DLINFER_CPU_ADAPTER_ROWS"
_OTHER = "use an adapter that was trained for this model"

_asked: ContextVar[Mapping[str, str] | None] = ContextVar("adapters", default=None)
"""The adapters of the model that is being built: name -> folder."""


@dataclass(frozen=True)
class Layer:
    """An adapter's part in one module: A is [rank, inputs], and B is [outputs, rank].

    is_dora: whether it has magnitudes [outputs], too (DoRA, Liu et al., 2024, arXiv:2402.09353).
    """

    rank: int
    scaling: float
    inputs: int
    outputs: int
    is_dora: bool = False


@dataclass(frozen=True)
class LoraModule:
    """A module of transformers' model that supports LoRA in LMDeploy.

    linear: LMDeploy's layer. part: the module's index if LMDeploy merged several modules into the layer, else None.
    """

    linear: Any
    part: int | None

    def columns(self) -> slice:
        """Return the module's columns of the layer's result, on this rank."""
        if self.part is None:
            return slice(0, self.linear.out_features)
        begin = sum(self.linear.all_out_features[: self.part])
        return slice(begin, begin + self.linear.all_out_features[self.part])

    def is_plain(self) -> bool:
        """Return whether the layer has a floating-point matrix, all of it on this rank."""
        weight = getattr(self.linear, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or self.linear.tp > 1:
            return False
        return weight.dim() == 2 and weight.numel() == self.linear.in_features * self.linear.out_features

    def sizes(self) -> tuple[int, int]:
        """Return in_features and out_features over all ranks."""
        linear, columns = self.linear, self.columns()
        outputs = columns.stop - columns.start
        if not linear.colwise:
            return linear.in_features * linear.tp, outputs
        # With fewer heads of k and v (parts 1 and 2 of q, k and v) than ranks, ranks share a head.
        copies = getattr(linear, "num_replicate_kv_heads", 1) if self.part else 1
        return linear.in_features, outputs * linear.tp // copies


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of an engine: its name and its folder."""

    name: str
    path: str

    def fault(self, detail: str, advice: str = _AGAIN) -> AdapterFolderError:
        return AdapterFolderError(name=self.name, path=self.path, detail=detail, advice=advice)

    def targets(self) -> set[str]:
        """Return the adapter's target_modules.

        Raises AdapterFolderError if its configuration has an option that LMDeploy ignores, or invalid target_modules.
        """
        config = self._config()
        for key, plain in _PLAIN.items():
            if key in config and config[key] not in plain:
                raise self.fault(f"LMDeploy ignores {key}={config[key]!r} in its {_CONFIG}", _RETRAIN)
        names = config.get("target_modules")
        if isinstance(names, str):
            detail = f"target_modules={names!r} is a pattern, but LMDeploy supports only a list of names"
            raise self.fault(detail, f"replace the pattern in {_CONFIG} by a list of module names")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise self.fault(f"its {_CONFIG} has target_modules={names!r}, not a list of module names")
        return set(names)

    def layers(self) -> dict[str, Layer]:
        """Return the adapter's part in each module: a dict from the module's path in transformers' model to a Layer.

        Raises AdapterFolderError in these cases:

        - A tensor is not a LoRA weight of a linear layer.
        - A module lacks A or B.
        - A or B does not have the configured rank.
        - A rank or an alpha in the configuration is invalid.
        """
        config = self._config()
        sides: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, size in self._tensors().items():
            match = _TENSOR.fullmatch(key)
            if match is None:
                raise self.fault(f"the tensor {key} is not a LoRA weight of a linear layer", _RETRAIN)
            sides.setdefault(match["module"], {})[match["side"] or MAGNITUDES] = size
        if not sides:
            raise self.fault("it has no tensors")
        return {module: self._layer(module, tensors, config) for module, tensors in sides.items()}

    def _layer(self, module: str, tensors: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Layer:
        """Return one module's Layer. tensors: "A", "B" and, for DoRA, ``MAGNITUDES`` -> size."""
        expected = {"A", "B", *([MAGNITUDES] if config.get("use_dora") else [])}
        if tensors.keys() != expected:
            has, needs = (
                ", ".join(f"lora_{side}" for side in sorted(sides)) for sides in (tensors, expected)
            )
            raise self.fault(f"{module} has {has}, not {needs}")
        rank = self._configured(config, "r", "rank_pattern", module)
        alpha = self._configured(config, "lora_alpha", "alpha_pattern", module)
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise self.fault(
                f"its {_CONFIG} has r={rank!r} and lora_alpha={alpha!r} for {module}; r must be at least 1, and "
                "lora_alpha a number"
            )
        a, b = tensors["A"], tensors["B"]
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise self.fault(f"{module} has A of size {a} and B of size {b}, which do not have rank {rank}")
        if tensors.get(MAGNITUDES, (b[0],)) != (b[0],):
            raise self.fault(f"{module} has magnitudes of size {tensors[MAGNITUDES]}, not {(b[0],)}")
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        return Layer(rank, scaling, a[1], b[0], is_dora=MAGNITUDES in tensors)

    def _configured(self, config: Mapping[str, Any], key: str, pattern_key: str, module: str) -> Any:
        """Return a module's rank or alpha as PEFT computes it. The first pattern that matches overrides ``key``."""
        patterns = config.get(pattern_key) or {}
        try:
            for pattern, value in patterns.items():
                if re.match(rf"(.*\.)?({pattern})$", module):  # PEFT's get_pattern_key
                    return value
        except (AttributeError, re.error):
            raise self.fault(
                f"its {_CONFIG} has {pattern_key}={patterns!r}, not an object of patterns"
            ) from None
        return config.get(key)

    def rows(self) -> int:
        """Return the adapter's highest rank in a module."""
        return max(layer.rank for layer in self.layers().values())

    def layers_of(self, model: torch.nn.Module) -> dict[str, Layer]:
        """Return ``layers()`` by the modules' paths in LMDeploy's model."""
        return {_path(model, module): layer for module, layer in self.layers().items()}

    def weights_of(self, model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (path in LMDeploy's model, "A", "B" or ``MAGNITUDES``, tensor) of each weight.

        Call ``layers`` first, which checks the file.
        """
        from transformers.modeling_utils import load_state_dict

        for key, tensor in load_state_dict(str(self._file())).items():
            if match := _TENSOR.fullmatch(key):
                yield _path(model, match["module"]), match["side"] or MAGNITUDES, tensor

    def check_fit(self, model: torch.nn.Module, modules: Mapping[str, LoraModule]) -> None:
        """Raise AdapterFolderError unless the adapter has weights for all its target modules, in the right sizes.

        model: LMDeploy's model. modules: its modules that support LoRA, from ``lora_modules``.
        """
        stored, targets = self.layers_of(model), sorted(self.targets())
        for path, layer in stored.items():
            module = modules.get(path)
            if module is None or not any(_is_named(path, target) for target in targets):
                detail = f"it has weights for {path}, but the model has no target module of this name"
                raise self.fault(detail, _OTHER)
            if (layer.inputs, layer.outputs) != module.sizes():
                sizes = f"A with {layer.inputs} inputs and B with {layer.outputs} outputs"
                inputs, outputs = module.sizes()
                detail = f"{path} has {sizes}, but in the model it has {inputs} inputs and {outputs} outputs"
                raise self.fault(detail, _OTHER)
            if layer.is_dora and not module.is_plain():
                detail = f"it uses DoRA, and {path} has quantised or packed weights, or runs on several ranks"
                raise self.fault(
                    detail, "use weights in floats and tp=1, or merge the adapter into the model"
                )
        for target in targets:
            self._check_target(model, target, [path for path in modules if _is_named(path, target)])
        required = {path for path in modules for target in targets if _is_named(path, target)}
        if missing := sorted(required - stored.keys()):
            of = f"{missing[0]} ({len(missing)} such modules)"
            raise self.fault(
                f"it has no weights for {of}",
                "use an adapter with weights for all target modules, or merge it into the model",
            )

    def _check_target(self, model: torch.nn.Module, target: str, served: Sequence[str]) -> None:
        """Raise AdapterFolderError if ``target`` names no module, or also one that does not support LoRA in LMDeploy.

        served: the paths of modules that it names and that support LoRA.
        """
        last = target.rpartition(".")[2]
        parents = {path.rpartition(".")[0] for path in served}
        for path, module in model.named_modules():
            parent, _, name = path.rpartition(".")
            is_other = parent and name == last and parent not in parents and type(module).__name__ != "LoRA"
            if is_other and _is_named(path, target):
                raise self.fault(
                    f"LMDeploy does not support LoRA on {path}",
                    f"use an adapter without {target!r} in target_modules",
                )
        if not served:
            detail = f"{type(model).__name__} has no module named {target!r}, which target_modules names"
            raise self.fault(detail, _OTHER)

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

    def _file(self) -> Path:
        path = next((Path(self.path, file) for file in _WEIGHTS if Path(self.path, file).is_file()), None)
        if path is None:
            raise self.fault(f"it holds no weights (none of {', '.join(_WEIGHTS)})")
        return path

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        path = self._file()
        try:
            names_in(path)  # compares the header with the length of the file
            return {key: tuple(tensor.shape) for key, tensor in model_files.empty_tensors(path)}
        except Exception as error:  # noqa: BLE001 - a file that is not whole fails in many ways
            raise self.fault(f"{path.name} is truncated or corrupt ({in_short(error)})") from None


def check_engine_config(config: Any) -> None:
    """Raise an error if an adapter's folder cannot be served, or if rows are reserved together with tp > 1.

    If rows are reserved, the configuration gets an empty dict of adapters instead of None, because LMDeploy builds no
    LoRA layers for None. config: a PytorchEngineConfig.
    """
    check_folders(config.adapters)
    if devices.reserved_rows(config.device_type):
        if config.tp != 1:
            raise refuse(
                f"tp={config.tp} with DLINFER_CPU_ADAPTER_ROWS", "use tp=1, or unset it", config.device_type
            )
        config.adapters = config.adapters or {}


def check_folders(folders: Mapping[str, str] | None) -> None:
    """Raise AdapterFolderError for the first adapter that cannot be served on any model.

    folders: adapter name -> folder or hub id. This function skips hub ids. ``check_asked`` checks them after the
    download.
    """
    for adapter in starmap(Adapter, (folders or {}).items()):
        if Path(adapter.path).exists() or looks_like_path(str(adapter.path)):
            adapter.targets()
            adapter.layers()


def check_model(model: torch.nn.Module, adapters: Mapping[str, str]) -> None:
    """Raise UnsupportedFeatureError unless the model's class is in ``SERVED``.

    Raises AdapterFolderError if an adapter's weights do not match the model's layers.
    model: LMDeploy's model; its weights need not be loaded. adapters: adapter name -> folder.
    """
    served = type(model).__name__
    if served not in SERVED:
        advice = "merge the adapter into the model (PEFT's merge_and_unload)" if adapters else _UNSET
        raise refuse(f"a LoRA adapter on {served}", advice)
    # In W8A8 ranks would quantise their part of an input alone, unlike without adapters. FP8 was never compared.
    splits = (layer for layer in model.modules() if getattr(layer, "tp", 1) > 1)
    if any(hasattr(layer, name) for layer in splits for name in ("quant_dtype", "fp8_dtype")):
        raise refuse("tp > 1 with LoRA adapters on weights of 8 bits", "use unquantised weights, or tp=1")
    modules = lora_modules(model)
    for adapter in starmap(Adapter, adapters.items()):
        adapter.check_fit(model, modules)


def lora_modules(model: torch.nn.Module) -> dict[str, LoraModule]:
    """Return the modules of an LMDeploy model that support LoRA: a dict from the module's path to a LoraModule.

    A module that LMDeploy merged into another has the path that it has in transformers' model.
    """
    from lmdeploy.pytorch.nn.linear.base import LinearBase

    merged = {} if type(model).__name__ in _MERGED else getattr(model, "packed_modules_mapping", {})
    modules: dict[str, LoraModule] = {}
    for path, module in model.named_modules():
        if not isinstance(module, LinearBase) or ".layers." not in path:
            continue
        parent, _, last = path.rpartition(".")
        names = merged.get(last, [last])
        for part, name in enumerate(names):
            modules[f"{parent}.{name}"] = LoraModule(module, part if last in merged else None)
    return modules


def _is_named(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _path(model: torch.nn.Module, module: str) -> str:
    """Return a module's path in LMDeploy's model. module: its path in transformers' model, which adapter files use."""
    now, before = _NAMED.get(type(model).__name__, ("", ""))
    return before + module.removeprefix(now) if now and module.startswith(now) else module


def check_asked(model: Any) -> None:
    """Raise an error if one of the engine's adapters cannot be served on ``model``, which LMDeploy is building.

    This raises the errors of ``check_folders`` and ``check_model``.
    """
    adapters = _asked.get()
    if adapters or (adapters is not None and devices.reserved_rows(activation.active())):
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
