"""A checkpoint is loaded into a copy of the model that holds no memory, before the model itself is loaded.

LMDeploy's own code maps names, joins parameters and cuts tensors up, here for shapes alone. So a tensor is named that
has no place, has another shape, or is missing, also where it is one part of a joined parameter: LMDeploy leaves such a
part as whatever was in memory. A tensor whose values are asked for on the way, as a packed one's scales are, is read.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import DlinferError, ModelFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder.written import Written
from dlinfer.framework.lmdeploy_ext.conversion import loading, model_files

_SHOWN = 3
_ADVICE = "copy or download the model again, whole; or see that config.json belongs to these weights"
_NO_HEAD = (
    "set tie_word_embeddings to true in config.json if the model ties them; else copy the model again, whole"
)


def check(folder: Path, build: Callable[[], Any]) -> None:
    """Raise ModelFolderError unless a folder's tensors fill every parameter of a model, and each has its place.

    build: returns a new model of LMDeploy's on torch's device ``meta``, as it is before weights are loaded. Raises
    UnsupportedFeatureError too, where the checkpoint cannot be converted.
    """
    read: set[str] = set()  # patterns of the tensors whose values are needed
    while True:
        load = _Load(folder, build(), read)
        try:
            load.run()
            break
        except Exception as error:
            if not load.name:
                raise
            wider = next((one for one in _patterns(load.name) if one not in read), None)
            if wider is not None and isinstance(error, RuntimeError):
                read.add(wider)  # a kernel may lack values that ``meta`` does not hold
            elif isinstance(error, DlinferError):
                raise
            else:
                raise _misfit(folder, load, error) from error
    unfilled = load.unfilled()
    if unfilled:
        raise _incomplete(folder, unfilled, load)


def _patterns(name: str) -> tuple[str, str, str]:
    """Which tensors are read where one without values is not enough: its like in other layers, then more, then all."""
    return re.sub(r"\d+", "*", name), f"*.{name.rpartition('.')[2]}", "*"


class _Load:
    """One load. name: of the tensor that is loaded at the moment; ``shape``: its shape."""

    def __init__(self, folder: Path, model: Any, read: set[str]) -> None:
        self._folder, self.model, self._read = folder, model, read
        self.name, self.shape = "", torch.Size()
        self.written = Written(lambda: self.name)

    def run(self) -> None:
        """Load every file, as LMDeploy's loader does, and what classes make of weights once all are loaded."""
        from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader

        dummies = [f"{name}." for name, one in self.model.named_modules() if getattr(one, "_is_dummy_mod", 0)]
        plan = loading.plan_of_folder(self._folder)
        layers = loading.Layers(self.model)
        with torch.inference_mode(), self.written:
            for path in model_files.weight_files(self._folder):
                tensors = self._tensors(path)
                if plan is not None and not plan.packs:
                    tensors = loading.converted(tensors, plan, layers)
                tensors = ModelWeightLoader._rename_weights_iterator(tensors, self.model)
                self.model.load_weights(ModelWeightLoader._skip_dummy_iterator(tensors, dummies))
            self.name = ""
            self._finish()

    def _tensors(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model_files.empty_tensors(path):
            self.name, self.shape = name, tensor.shape
            yield name, model_files.tensor(path, name) if self._read.intersection(_patterns(name)) else tensor

    def _finish(self) -> None:
        for one in self.model.modules():
            if hasattr(one, "get_input_embeddings") and hasattr(one, "update_weights"):
                one.update_weights()  # ties the output projection
            if hasattr(one, "process_weights_after_loading"):
                one.process_weights_after_loading()  # latent attention makes two weights of one

    def unfilled(self) -> list[tuple[str, Tensor, tuple[int, int]]]:
        """(name, parameter, the first run of numbers that are missing)."""
        found = ((name, one, self.written.gap(one)) for name, one in self.model.named_parameters())
        # EAGLE-3's drafts say so where their checkpoint has no embedding, and get their target's.
        borrowed = () if getattr(self.model, "include_embed_tokens", True) else ("embed_tokens.weight",)
        return [
            (name, one, gap) for name, one, gap in found if gap is not None and not name.endswith(borrowed)
        ]


def _misfit(folder: Path, load: _Load, error: Exception) -> ModelFolderError:
    if isinstance(error, KeyError):
        why = f"LMDeploy's class {type(load.model).__name__} has no place for it"
    else:
        said = str(error).strip() or type(error).__name__
        why = f"it does not fit LMDeploy's class {type(load.model).__name__} ({said})"
    detail = f"tensor {load.name} of shape {list(load.shape)}: {why}"
    return ModelFolderError(path=str(folder), detail=detail, advice=_ADVICE)


def _incomplete(
    folder: Path, unfilled: list[tuple[str, Tensor, tuple[int, int]]], load: _Load
) -> ModelFolderError:
    name, parameter, gap = unfilled[0]
    whole = [one for one, parameter, gap in unfilled if gap == (0, parameter.numel())]
    advice = _NO_HEAD if [one for one, _, _ in unfilled] == ["lm_head.weight"] else _ADVICE
    if gap == (0, parameter.numel()):
        shown = ", ".join(whole[:_SHOWN]) + (", ..." if len(whole) > _SHOWN else "")
        detail = f"its files hold no values for {shown} ({len(unfilled)} parameters in all)"
    else:
        held = ", ".join(load.written.sources(parameter)[:_SHOWN])
        detail = (
            f"its files hold a part of {name} alone: of {parameter.numel()} numbers, {gap[1] - gap[0]} from number "
            f"{gap[0]} on are missing ({len(unfilled)} parameters in all); stored are {held}"
        )
    return ModelFolderError(path=str(folder), detail=detail, advice=advice)
