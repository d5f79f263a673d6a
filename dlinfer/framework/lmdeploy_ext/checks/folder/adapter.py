"""Refuses a LoRA adapter's folder before an engine starts, unless it is whole and holds plain LoRA.

LMDeploy reads the names of the modules, the rank and alpha, and ignores the rest of PEFT's configuration. It would then
serve other numbers than the adapter was trained for. These checks read names and sizes of the weights, not numbers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of an engine: its name and its folder."""

    name: str
    path: str

    def fault(self, detail: str, advice: str = _AGAIN) -> AdapterFolderError:
        """The error for this adapter."""
        return AdapterFolderError(name=self.name, path=self.path, detail=detail, advice=advice)

    def targets(self) -> set[str]:
        """The names of modules in its configuration. Raises AdapterFolderError for what LMDeploy ignores."""
        config = self._config()
        for key, plain in _PLAIN.items():
            if key in config and config[key] not in plain:
                raise self.fault(f"LMDeploy ignores {key}={config[key]!r} in its {_CONFIG}", _RETRAIN)
        rank, alpha, names = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise self.fault(f"its {_CONFIG} has r={rank!r} and lora_alpha={alpha!r}")
        if isinstance(names, str):
            detail = f"target_modules={names!r} is a pattern, which LMDeploy reads letter by letter"
            raise self.fault(detail, f"write the list of names into {_CONFIG}")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise self.fault(f"its {_CONFIG} has target_modules={names!r}")
        return set(names)

    def sizes(self) -> Sizes:
        """The sizes of its weights, [rank, in] and [out, rank]. Raises AdapterFolderError."""
        rank = self._config().get("r")
        sides: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, size in self._tensors().items():
            match = _TENSOR.fullmatch(key)
            if match is None:
                raise self.fault(f"the tensor {key} is not LoRA of a linear layer", _RETRAIN)
            sides.setdefault(match["module"], {})[match["side"]] = size
        if not sides:
            raise self.fault("it has no tensors")
        for module, tensors in sides.items():
            if tensors.keys() != {"A", "B"}:
                raise self.fault(f"{module} has lora_{min(tensors)} alone")
            a, b = tensors["A"], tensors["B"]
            if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
                raise self.fault(f"{module} has A of {a} and B of {b}, which is not of rank {rank}")
        return {module: (tensors["A"], tensors["B"]) for module, tensors in sides.items()}

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


def adapters_of(folders: Mapping[str, str] | None) -> list[Adapter]:
    """The adapters of an engine. folders: name -> folder, or an id of a hub."""
    return [Adapter(name, str(path)) for name, path in (folders or {}).items()]


def check_folders(folders: Mapping[str, str] | None) -> None:
    """Raise AdapterFolderError for the first adapter that cannot be served on any model.

    folders: as for ``adapters_of``. Files of a hub are checked once they are fetched.
    """
    for adapter in adapters_of(folders):
        if Path(adapter.path).exists() or looks_like_path(adapter.path):
            adapter.targets()
            adapter.sizes()
