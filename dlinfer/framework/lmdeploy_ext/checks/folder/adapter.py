"""Refuses a LoRA adapter's folder before an engine starts, unless it is whole and holds plain LoRA.

LMDeploy reads the names of the modules, the rank and alpha, and ignores the rest of PEFT's configuration. It would then
serve other numbers than the adapter was trained for. These checks read names and sizes of the weights, not numbers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlinfer.errors import AdapterFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import looks_like_path, names_in
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.errors import in_short

# Key of adapter_config.json -> the values that LMDeploy may ignore.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # The others (PiSSA, OLoRA, CorDA, LoftQ) have PEFT change the model's own weights as it loads the adapter.
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
# LMDeploy looks for them in this order.
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

    adapters: name -> folder, or an id of a hub, whose files are checked once they are fetched.
    """
    for name, path in (adapters or {}).items():
        if Path(path).exists() or looks_like_path(str(path)):
            targets(name, path)
            sizes(name, path)


def targets(name: str, path: str) -> set[str]:
    """The names of modules in an adapter's configuration. Raises AdapterFolderError for what LMDeploy ignores."""
    config = _config(name, Path(path))
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            detail = f"LMDeploy ignores {key}={config[key]!r} in its {_CONFIG}"
            raise fault(name, path, detail, _RETRAIN)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise fault(name, path, f"its {_CONFIG} has r={rank!r} and lora_alpha={alpha!r}")
    names = config.get("target_modules")
    if isinstance(names, str):
        detail = f"target_modules={names!r} is a pattern, which LMDeploy reads letter by letter"
        raise fault(name, path, detail, f"write the list of names into {_CONFIG}")
    if not isinstance(names, list) or not names or not all(isinstance(item, str) for item in names):
        raise fault(name, path, f"its {_CONFIG} has target_modules={names!r}")
    return set(names)


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
    for module, tensors in sides.items():
        if tensors.keys() != {"A", "B"}:
            raise fault(name, path, f"{module} has lora_{min(tensors)} alone")
        a, b = tensors["A"], tensors["B"]
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise fault(name, path, f"{module} has A of {a} and B of {b}, which is not of rank {rank}")
        result[module] = a, b
    return result


def _config(name: str, folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        what = "it is a file, not a folder" if folder.exists() else "there is no such folder"
        raise fault(name, str(folder), what)
    try:
        return model_files.read_json(folder / _CONFIG)
    except FileNotFoundError:
        raise fault(name, str(folder), f"it has no {_CONFIG}") from None
    except ValueError as error:
        raise fault(name, str(folder), str(error)) from None


def _tensors(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    path = next((folder / file for file in _WEIGHTS if (folder / file).is_file()), None)
    if path is None:
        raise fault(name, str(folder), f"it holds no weights (none of {', '.join(_WEIGHTS)})")
    try:
        names_in(path)  # compares the header with the length of the file
        return {key: tuple(tensor.shape) for key, tensor in model_files.empty_tensors(path)}
    except Exception as error:  # noqa: BLE001 - a file that is not whole fails in many ways
        raise fault(name, str(folder), f"{path.name} is truncated or corrupt ({in_short(error)})") from None
