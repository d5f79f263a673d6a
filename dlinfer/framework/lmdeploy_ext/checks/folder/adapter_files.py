"""A LoRA adapter's folder is looked at before an engine starts: that it is whole, and that it is plain LoRA.

LMDeploy reads the names of the modules, the rank and alpha, and passes over all else that PEFT's configuration may say:
it would serve other numbers than the adapter was trained for. Of the weights names and sizes are read, not the numbers.
"""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dlinfer.errors import AdapterFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_checks import looks_like_path

# Key of adapter_config.json -> the values that ask for nothing that LMDeploy passes over.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # The others (PiSSA, OLoRA, CorDA, LoftQ) have PEFT change the model's own weights as it loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_CONFIG = "adapter_config.json"
# In the order in which LMDeploy looks for them.
_WEIGHTS = ("adapter_model.bin", "adapter_model.safetensors")
_AGAIN = "give the folder that PEFT's save_pretrained wrote, whole"
_RETRAIN = "merge the adapter into the model (PEFT's merge_and_unload), or use an adapter of plain LoRA"

Sizes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Path of a module in the model -> the sizes of A and of B."""


def fault(name: str, path: str, detail: str, advice: str = _AGAIN) -> AdapterFolderError:
    """The error for an adapter."""
    return AdapterFolderError(name=name, path=path, detail=detail, advice=advice)


def check_folders(adapters: Mapping[str, str] | None) -> None:
    """Raise AdapterFolderError for the first adapter that cannot be served on any model.

    adapters: name -> folder, or an id of a hub, which is checked once it is here.
    """
    for name, path in (adapters or {}).items():
        if Path(path).is_dir() or Path(path).exists() or looks_like_path(str(path)):
            targets(name, path)
            sizes(name, path)


def targets(name: str, path: str) -> set[str]:
    """The names of modules that an adapter's configuration asks for. Raises AdapterFolderError for what it must not."""
    config = _config(name, Path(path))
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            detail = f"LMDeploy passes over {key}={config[key]!r} of its {_CONFIG}"
            raise fault(name, path, detail, _RETRAIN)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise fault(name, path, f"its {_CONFIG} has r={rank!r} and lora_alpha={alpha!r}")
    found = config.get("target_modules")
    if isinstance(found, str):
        detail = f"target_modules={found!r} is a pattern, which LMDeploy takes for letters"
        raise fault(name, path, detail, f"write the list of names into {_CONFIG}")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise fault(name, path, f"its {_CONFIG} has target_modules={found!r}")
    return set(found)


def sizes(name: str, path: str) -> Sizes:
    """The sizes of an adapter's weights, [rank, in] and [out, rank]. Raises AdapterFolderError."""
    rank = _config(name, Path(path)).get("r")
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, size in _tensors(name, Path(path)).items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise fault(name, path, f"the tensor {key} is not LoRA of a linear layer", _RETRAIN)
        sides.setdefault(match["module"], {})[match["side"]] = size
    if not sides:
        raise fault(name, path, "it has no tensors")
    result: Sizes = {}
    for module, found in sides.items():
        if found.keys() != {"A", "B"}:
            raise fault(name, path, f"{module} has lora_{min(found)} alone")
        a, b = found["A"], found["B"]
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise fault(name, path, f"{module} has A of {a} and B of {b}, which is not of rank {rank}")
        result[module] = a, b
    return result


def _config(name: str, folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        what = "it is a file, not a folder" if folder.exists() else "there is no such folder"
        raise fault(name, str(folder), what)
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise fault(name, str(folder), f"it has no {_CONFIG}") from None
    except ValueError as error:
        raise fault(name, str(folder), f"{_CONFIG} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise fault(name, str(folder), f"{_CONFIG} does not hold a JSON object")
    return config


def _tensors(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    found = next((folder / one for one in _WEIGHTS if (folder / one).is_file()), None)
    if found is None:
        raise fault(name, str(folder), "it holds no weights (none of " + ", ".join(_WEIGHTS) + ")")
    try:
        if found.suffix == ".bin":
            state = torch.load(found, map_location="meta", weights_only=True)
            return {key: tuple(tensor.shape) for key, tensor in state.items()}
        with safe_open(found, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
        raise fault(name, str(folder), f"{found.name} is truncated or corrupt ({error})") from None
