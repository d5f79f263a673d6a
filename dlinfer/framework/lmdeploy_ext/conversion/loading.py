"""Where LMDeploy meets a conversion: as it reads a model's configuration, and as it reads the files of its weights."""

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import mapped
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM, Plan
from dlinfer.framework.lmdeploy_ext.conversion.experts import place_of
from dlinfer.framework.lmdeploy_ext.conversion.plan import asked_bits, asked_plan, plan_of
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Patch

logger = logging.getLogger("dlinfer")

_SHOWN = 3


def rewrite(hf_config: Any) -> None:
    """Give a configuration of transformers' LMDeploy's own method where its checkpoint is converted.

    Where LMDeploy has none, ``experts_packed_as`` says for our layer which it is. Raises UnsupportedFeatureError for a
    checkpoint that cannot be converted.
    """
    found = getattr(hf_config, "quantization_config", None)
    if found is None and not _is_inside(hf_config):
        plan = asked_plan(hf_config.to_dict())
        if plan is not None:
            hf_config.quantization_config = plan.config
    elif isinstance(found, Mapping):
        _tell_of_asked(found)
        plan = plan_of(found, hf_config.to_dict())
        if plan is not None and plan.config is None:
            del hf_config.quantization_config  # LMDeploy asks whether it is there, and not what it is
            hf_config.experts_packed_as = found["quant_method"]
        elif plan is not None:
            hf_config.quantization_config = plan.config


def is_packed_as_it_loads(hf_config: Any) -> bool:
    """Whether a configuration says what ``rewrite`` gave it for DLINFER_CPU_WEIGHTS, and its files are in floats."""
    found = getattr(hf_config, "quantization_config", None)
    if not isinstance(found, Mapping) or CONVERTED_FROM not in found:
        return False
    from dlinfer.framework.lmdeploy_ext.conversion import floats  # it knows packings: see ``plan_of``

    return floats.is_packed(found)


def _is_inside(hf_config: Any) -> bool:
    """Whether the language model inside a configuration says how it is quantised."""
    parts = (getattr(hf_config, name, None) for name in ("llm_config", "text_config"))
    return any(getattr(part, "quantization_config", None) is not None for part in parts)


def _tell_of_asked(found: Mapping[str, Any]) -> None:
    """Warn that DLINFER_CPU_WEIGHTS leaves a checkpoint as it is that is quantised already."""
    bits = asked_bits()
    if bits and CONVERTED_FROM not in found:
        logger.warning(
            "DLINFER_CPU_WEIGHTS=%s is for checkpoints in floats: this one is quantised already (%s) and stays so.",
            bits,
            found.get("quant_method", "unknown"),
        )


def stored_dtype(hf_config: Any) -> str | None:
    """The dtype of a converted checkpoint of 4 bits, for a choice that LMDeploy makes for AWQ; None for any other."""
    found = getattr(hf_config, "quantization_config", None)
    if not isinstance(found, Mapping) or CONVERTED_FROM not in found or found.get("quant_method") != "awq":
        return None
    stored = str(getattr(hf_config, "dtype", None)).removeprefix("torch.")
    return stored if stored in ("bfloat16", "float32") else None


_JOINED: Mapping[str, Any] = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""What LMDeploy's classes join; Mixtral's and others do not say so."""


class Layers:
    """LMDeploy's linear layers by the names that checkpoints have, which know nothing of layers that are joined.

    Experts of 4 bits are such layers: one for gate and up of all of them, and one for down.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named: Mapping[str, Any] = getattr(model, "packed_modules_mapping", None) or {}
        self._modules = dict(model.named_modules())
        self._joined = {part: whole for whole, parts in {**_JOINED, **named}.items() for part in parts}

    def of(self, name: str) -> torch.nn.Module | None:
        """The layer that a tensor called ``name`` is of, or None: an embedding and a norm are none."""
        path = place_of(name.rpartition(".")[0])
        parent, _, last = path.rpartition(".")
        whole = self._joined.get(last, last)
        found = self._modules.get(path) or self._modules.get(f"{parent}.{whole}" if parent else whole)
        return found if hasattr(found, "in_features") else None


def _plan_of_folder(folder: Path) -> Plan | None:
    file = folder / "config.json"
    if not file.is_file():
        return None
    model = json.loads(file.read_text(encoding="utf-8-sig"))
    found = model.get("quantization_config")
    if found is None and not any(isinstance(model.get(name), dict) for name in _INSIDE):
        return asked_plan(model)
    return plan_of(found, model) if isinstance(found, dict) else None


_INSIDE = ("llm_config", "text_config")


def stored_plan(folder: Path) -> Plan | None:
    """How a checkpoint is converted that is quantised in its files; None for floats, also where they are packed."""
    plan = _plan_of_folder(folder)
    return None if plan is None or plan.packs else plan


def has_other_bytes(folder: Path) -> bool:
    """Whether a checkpoint takes other bytes in memory than in its files: packed as it loads, or in a layer of ours."""
    plan = _plan_of_folder(folder)
    return plan is not None and (plan.config is None or plan.packs)


def gives_back(folder: Path) -> bool:
    """Whether pages of a checkpoint's files are given back tensor by tensor, while it is packed."""
    plan = _plan_of_folder(folder)
    return plan is not None and plan.packs


def converted(
    weights: Iterable[tuple[str, Tensor]], plan: Plan, layers: Layers
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file as LMDeploy loads them. Raises UnsupportedFeatureError."""
    for name, tensor in weights:
        yield from plan.convert(name, tensor, layers.of(name))


def _with_nan_noted(weights: Iterable[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are; the names of those with NaN are added to ``names``. It reads each once more."""
    for name, tensor in weights:
        if (
            tensor.is_floating_point()
            and tensor.dtype.itemsize > 1
            and tensor.numel()
            and tensor.amax().isnan()
        ):
            names.append(name)
        yield name, tensor


def _has_tables(model: torch.nn.Module) -> bool:
    """Whether a model has its output projection packed, by ``layers.quantised.head``."""
    return hasattr(getattr(model, "lm_head", None), "numbers")


def _mapped(loader: Any) -> Callable[[str], Iterator[tuple[str, Tensor]]]:
    return functools.partial(mapped.tensors, prefix=loader._prefix or "")


def _load_model_weights(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_model_weights(self: Any, model: torch.nn.Module, device: torch.device | None = None) -> None:
        if activation.active() is None:
            original(self, model, device)
            return
        plan = _plan_of_folder(Path(self.model_path))
        packing: Any = getattr(model, "bf12_packing", None)  # of ``layers.quantised.bf12_packing``
        read = self._get_weights_iterator
        packs = (packing is not None and packing.gives_back) or (plan is not None and plan.packs)
        if packs and self._weight_type == "safetensors":
            read = _mapped(self)
        with_nan: list[str] = []
        stages = [functools.partial(_with_nan_noted, names=with_nan)]
        if plan is not None:
            stages.append(functools.partial(converted, plan=plan, layers=Layers(model)))
        if _has_tables(model):
            from dlinfer.framework.lmdeploy_ext.conversion import head  # it knows packings: see ``plan_of``

            stages.append(functools.partial(head.packed, model=model))
        self._get_weights_iterator = lambda path: functools.reduce(
            lambda found, stage: stage(found), stages, read(path)
        )
        original(self, model, device)
        if packing is not None:
            packing.finish()
        if with_nan:
            shown = ", ".join(with_nan[:_SHOWN]) + (", ..." if len(with_nan) > _SHOWN else "")
            logger.warning(
                "NaN among the numbers of %s in %s (%d tensors)", shown, self.model_path, len(with_nan)
            )

    return load_model_weights


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.weight_loader.model_weight_loader:ModelWeightLoader.load_model_weights",
        why="hands tensors to the model as the files have them; those of GPTQ and compressed-tensors are converted on "
        "the way, and floats packed where DLINFER_CPU_WEIGHTS asks for it",
        signature="(self, model, device=None)",
        build=_load_model_weights,
    ),
)
