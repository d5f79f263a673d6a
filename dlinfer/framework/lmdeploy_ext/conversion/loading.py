"""Patches LMDeploy's readers of configurations and weight files, so that they convert checkpoints."""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM, Plan, language_configs
from dlinfer.framework.lmdeploy_ext.conversion.plan import asked_bits, asked_plan, plan_of
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.gguf import weights
from dlinfer.framework.lmdeploy_ext.gguf.folder import GGUF_FILE
from dlinfer.framework.lmdeploy_ext.gguf.reader import is_gguf
from dlinfer.framework.patching import Original, replaces

logger = logging.getLogger("dlinfer")

_SHOWN = 3


def rewrite(hf_config: Any) -> None:
    """Replace the ``quantization_config`` of ``hf_config`` by the one of the converted checkpoint.

    hf_config: transformers' configuration. If LMDeploy does not know the quantisation method, the field is removed
    instead, and the new field ``experts_packed_as`` holds the format of the experts. An empty field (null or ``{}``) is
    removed too. Raises UnsupportedFeatureError for a checkpoint that cannot be converted.
    """
    for part in language_configs(hf_config):
        fields = part if isinstance(part, dict) else vars(part)
        if not fields.get("quantization_config", True):
            del fields["quantization_config"]  # LMDeploy tests hasattr, so None is not enough
    stored: Any = getattr(hf_config, "quantization_config", None)
    nested = (getattr(part, "quantization_config", None) for part in language_configs(hf_config)[1:])
    plan = None
    if isinstance(stored, Mapping):
        bits = asked_bits()
        if bits and CONVERTED_FROM not in stored:
            logger.warning(
                "DLINFER_CPU_WEIGHTS=%s has no effect: this checkpoint is already quantised (%s).",
                bits,
                stored.get("quant_method", "unknown"),
            )
        plan = plan_of(stored, hf_config.to_dict())
        if plan is not None and plan.config is None:
            del hf_config.quantization_config
            hf_config.experts_packed_as = plan.experts
    elif stored is None and all(part is None for part in nested):
        if asked_bits() and hasattr(hf_config, GGUF_FILE):
            logger.warning("DLINFER_CPU_WEIGHTS=%s has no effect: this is a GGUF file.", asked_bits())
        plan = asked_plan(hf_config.to_dict())
    if plan is not None and plan.config is not None:
        hf_config.quantization_config = plan.config


def stored_dtype(hf_config: Any) -> str | None:
    """Return the dtype to keep if a checkpoint is converted to AWQ: ``bfloat16`` or ``float32``; else None.

    LMDeploy itself would set the dtype of every AWQ model to float16.
    """
    config = getattr(hf_config, "quantization_config", None)
    if not isinstance(config, Mapping) or CONVERTED_FROM not in config or config.get("quant_method") != "awq":
        return None
    dtype = str(getattr(hf_config, "dtype", None)).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float32") else None


_JOINED = {f"{part}_proj": "qkv_proj" for part in "qkv"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
"""Projection -> LMDeploy's joined layer that contains it. A model's packed_modules_mapping takes precedence."""

_EXPERT_PARTS: dict[str, str] = dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up")
_EXPERT_PARTS |= dict.fromkeys(("down_proj", "w2"), "down")


def place_of(path: str) -> str:
    """Return the path in LMDeploy's model for the path of an expert's projection in the checkpoint.

    The checkpoint's ``model.layers.0.mlp.experts.7.up_proj`` becomes ``model.layers.0.mlp.experts.gate_up``. Paths of
    other modules are returned unchanged.
    """
    before, _, inside = path.partition(".experts.")
    expert, _, name = inside.partition(".")
    return f"{before}.experts.{_EXPERT_PARTS[name]}" if expert.isdigit() and name in _EXPERT_PARTS else path


class Layers:
    """Finds the linear layer of LMDeploy's model that owns a tensor of a checkpoint.

    LMDeploy joins layers that checkpoints store separately, such as q, k and v. 4-bit experts are two layers: one holds
    gate and up of all experts, the other holds down of all experts.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named: Mapping[str, Any] = getattr(model, "packed_modules_mapping", None) or {}
        self._modules = dict(model.named_modules())
        self._joined = _JOINED | {part: whole for whole, parts in named.items() for part in parts}

    def of(self, name: str) -> torch.nn.Module | None:
        """Return the linear layer that owns the tensor ``name``; None for other tensors (embeddings, norms)."""
        layer = self.owner(name)
        return layer if hasattr(layer, "in_features") else None

    def owner(self, name: str) -> torch.nn.Module | None:
        """Return the module that owns the tensor ``name``; None if the model has none."""
        path = place_of(name.rpartition(".")[0])
        parent, _, last = path.rpartition(".")
        whole = self._joined.get(last, last)
        return self._modules.get(path) or self._modules.get(f"{parent}.{whole}" if parent else whole)


def plan_of_folder(folder: Path) -> Plan | None:
    """Return the plan that converts or packs the checkpoint in a folder; None if the checkpoint loads unchanged."""
    if not (folder / "config.json").is_file():
        return None
    model = model_files.read_json(folder / "config.json")
    stored = model.get("quantization_config")
    nested = [
        part.get("quantization_config") for part in language_configs(model)[1:] if isinstance(part, dict)
    ]
    if not stored and not any(nested):
        return asked_plan(model)
    return plan_of(stored, model) if isinstance(stored, dict) else None


def converted(
    weights: Iterable[tuple[str, Tensor]], plan: Plan, layers: Layers
) -> Iterator[tuple[str, Tensor]]:
    """Convert the tensors of a weight file, and yield the tensors that LMDeploy loads instead.

    Raises UnsupportedFeatureError for values that the target format cannot hold.
    """
    for name, tensor in weights:
        yield from plan.convert(name, tensor, layers.of(name))


def _with_nan_noted(weights: Iterable[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors unchanged, and append the names of tensors with NaN to ``names``. This reads all values."""
    for name, tensor in weights:
        is_wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if is_wide and tensor.numel() and tensor.amax().isnan():
            names.append(name)
        yield name, tensor


def _gguf_tensors(path: str, prefix: str, packing: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a GGUF file that LMDeploy loads, unpacked. All others go to ``packing`` in blocks.

    packing: of ``layers.quantised.gguf_packing``.
    """
    for name, tensor, is_packed in weights.tensors(Path(path), prefix, packing.keeps, packing.dtype):
        if is_packed:
            packing.put(name, tensor)
        else:
            yield name, tensor


@replaces(
    "lmdeploy.pytorch.weight_loader.model_weight_loader:ModelWeightLoader.load_model_weights",
    why="passes tensors to the model as the files store them; GPTQ and compressed-tensors have to be converted "
    "first, and floats packed if DLINFER_CPU_WEIGHTS asks for it",
    when=activation.is_on,
)
def _load_model_weights(
    original: Original, self: Any, model: torch.nn.Module, device: torch.device | None = None
) -> None:
    plan = plan_of_folder(Path(self.model_path))
    packing: Any = getattr(model, "packing", None)  # of ``layers.quantised.packing`` or ``gguf_packing``
    read = self._get_weights_iterator
    packs = (packing is not None and packing.gives_back) or (plan is not None and plan.packs)
    if packs and self._weight_type == "safetensors":
        read = functools.partial(model_files.tensors, prefix=self._prefix or "")
    if any(is_gguf(Path(path)) for path in self._shard_paths):
        read = functools.partial(_gguf_tensors, prefix=self._prefix or "", packing=packing)
    with_nan: list[str] = []
    stages = [functools.partial(_with_nan_noted, names=with_nan)]
    if plan is not None:
        stages.append(functools.partial(converted, plan=plan, layers=Layers(model)))
    if hasattr(getattr(model, "lm_head", None), "numbers"):  # packed by ``layers.quantised.head``
        from dlinfer.framework.lmdeploy_ext.conversion import floats  # imports the ops: see ``plan_of``

        stages.append(functools.partial(floats.packed_head, model=model))
    self._get_weights_iterator = lambda path: functools.reduce(
        lambda weights, stage: stage(weights), stages, read(path)
    )
    original(self, model, device)
    if packing is not None:
        packing.finish()
    if with_nan:
        shown = ", ".join(with_nan[:_SHOWN]) + (", ..." if len(with_nan) > _SHOWN else "")
        count = len(with_nan)
        logger.warning(
            "%s in %s contain NaN (%d tensors), so answers may be garbage. Next step: copy or download the model again",
            shown,
            self.model_path,
            count,
        )
