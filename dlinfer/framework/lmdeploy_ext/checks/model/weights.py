"""Refuses a checkpoint that does not fill its model, before the weights are read.

LMDeploy allocates parameters without initialising them, and never checks whether all were loaded. If the checkpoint
lacks a tensor, the model silently generates garbage. So the checkpoint is first loaded into a copy of the model on
torch's device ``meta``. There LMDeploy's own loaders map names, join parameters and slice tensors by shape only. This
finds a tensor that belongs to no parameter, has a wrong shape, or is missing, even if it is only a part of a joined
parameter. Values are read only for tensors whose values the loaders need, such as a packed tensor's scales.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import DlinferError, ModelFolderError
from dlinfer.framework.lmdeploy_ext.checks.model.written import Written
from dlinfer.framework.lmdeploy_ext.conversion import loading, model_files
from dlinfer.framework.lmdeploy_ext.conversion.plan import is_packed_as_it_loads
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.patching import Original, replaces

_COPIES = "dlinfer_builds_copy"
_SHOWN = 3
_ADVICE = "copy or download the complete model again, or check that config.json belongs to these weights"
_NO_HEAD = "set tie_word_embeddings to true in config.json if the model ties them; else copy the complete model again"


def note_copy(model: Any, build: Callable[..., Any], config: Any, context: Any) -> None:
    """Attach to ``model`` a function that builds the model again on torch's device ``meta``.

    The copy has the format of the model's files, even if ``model`` packs weights while they load.
    build: LMDeploy's ``build_patched_model``. config, context: the arguments that built ``model``.
    """
    from lmdeploy.pytorch.config import QuantizationConfig
    from lmdeploy.pytorch.devices import get_device_manager
    from lmdeploy.pytorch.distributed import get_dist_manager

    device, ranks = get_device_manager().current_context(), get_dist_manager().current_context()
    assert device is not None and ranks is not None, "LMDeploy sets both before it builds a model"

    def build_again() -> Any:
        stored, built = config, context
        if is_packed_as_it_loads(getattr(config.hf_config, "quantization_config", None)):
            stored = copy.copy(config)
            stored.hf_config = copy.deepcopy(config.hf_config)
            del stored.hf_config.quantization_config
            built = dataclasses.replace(context, quant_config=QuantizationConfig())
        with get_dist_manager().context(ranks), get_device_manager().context(device):
            return build(stored, torch.device("meta"), built)

    setattr(model, _COPIES, build_again)


@replaces(
    "lmdeploy.pytorch.weight_loader.model_weight_loader:load_model_weights",
    why="silently leaves parameters uninitialised if the checkpoint lacks them",
    when=activation.is_on,
)
def load_model_weights(
    original: Original,
    model: torch.nn.Module,
    checkpoint_path: str,
    prefix: str | None = None,
    device: torch.device | None = None,
) -> None:
    check(model, Path(checkpoint_path))
    try:
        original(model, checkpoint_path, prefix, device)
    except (AssertionError, KeyError, ValueError) as error:  # LMDeploy's loaders compare some values
        detail = f"LMDeploy cannot load its weights ({in_short(error)})"
        advice = "check that config.json belongs to these weights"
        raise ModelFolderError(path=checkpoint_path, detail=detail, advice=advice) from error


def check(model: Any, folder: Path) -> None:
    """Raise ModelFolderError unless the tensors of a folder match the model's parameters and fill all of them.

    Raises UnsupportedFeatureError if the quantised checkpoint cannot be converted to a format that LMDeploy reads.
    model: ``note_copy`` must have prepared it.
    """
    build = model.__dict__.pop(_COPIES)
    read: set[str] = set()  # patterns of names of the tensors whose values are read
    while True:
        load = _Load(folder, build(), read)
        try:
            load.run()
            break
        except Exception as error:
            if not load.name:
                raise
            wider = next((pattern for pattern in _patterns(load.name) if pattern not in read), None)
            if wider is not None and isinstance(error, RuntimeError):
                read.add(wider)  # a kernel may need values that ``meta`` does not hold
            elif isinstance(error, DlinferError):
                raise
            else:
                raise _misfit(load, error) from error
    if unfilled := load.unfilled():
        raise _incomplete(load, unfilled)


def _patterns(name: str) -> tuple[str, str, str]:
    """Return three patterns of tensor names, from narrow to wide. All three match ``name``.

    The first matches the same tensor in every layer, the second every tensor with the same last part, the third all
    tensors. If a loader needs the values of the tensor ``name``, ``check`` loads again with the next wider pattern, and
    then reads all matching tensors with values.
    """
    return re.sub(r"\d+", "*", name), f"*.{name.rpartition('.')[2]}", "*"


_Gaps = list[tuple[str, Tensor, tuple[int, int]]]
"""The parameters that are not filled, as (name, parameter, (first, end) of the first run of missing elements)."""


class _Load:
    """One load of a folder's files into a model on ``meta``.

    read: patterns of tensor names. Matching tensors are read with values, all others only with shapes.
    The attributes ``name`` and ``shape`` describe the tensor that is being loaded.
    """

    def __init__(self, folder: Path, model: Any, read: set[str]) -> None:
        self.folder, self.model, self._read = folder, model, read
        self.name, self.shape = "", torch.Size()
        self.written = Written(lambda: self.name)

    def run(self) -> None:
        """Load every file as LMDeploy's loader does, and call the methods that it calls on modules afterwards."""
        from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader

        modules = self.model.named_modules()
        dummies = [f"{name}." for name, module in modules if getattr(module, "_is_dummy_mod", False)]
        plan = loading.plan_of_folder(self.folder)
        layers = loading.Layers(self.model)
        with torch.inference_mode(), self.written:
            for path in model_files.weight_files(self.folder):
                tensors = self._tensors(path)
                if plan is not None and not plan.packs:
                    tensors = loading.converted(tensors, plan, layers)
                tensors = ModelWeightLoader._rename_weights_iterator(tensors, self.model)
                self.model.load_weights(ModelWeightLoader._skip_dummy_iterator(tensors, dummies))
            self.name = ""
            for module in self.model.modules():
                if hasattr(module, "get_input_embeddings") and hasattr(module, "update_weights"):
                    module.update_weights()  # ties the output projection
                if hasattr(module, "process_weights_after_loading"):
                    module.process_weights_after_loading()  # latent attention makes two weights from one

    def _tensors(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        tensor_of = functools.cache(lambda: model_files.lookup(path))  # of most files no values are read
        for name, tensor in model_files.empty_tensors(path):
            self.name, self.shape = name, tensor.shape
            yield name, tensor_of()(name) if self._read.intersection(_patterns(name)) else tensor

    def unfilled(self) -> _Gaps:
        # EAGLE-3 drafts whose checkpoint has no embedding have include_embed_tokens=False, and use the target's.
        borrowed = () if getattr(self.model, "include_embed_tokens", True) else ("embed_tokens.weight",)
        return [
            (name, parameter, gap)
            for name, parameter in self.model.named_parameters()
            if not name.endswith(borrowed) and (gap := self.written.gap(parameter)) is not None
        ]


def _misfit(load: _Load, error: Exception) -> ModelFolderError:
    served = type(load.model).__name__
    why = f"it does not fit LMDeploy's class {served} ({str(error).strip() or type(error).__name__})"
    if isinstance(error, KeyError):
        why = f"LMDeploy's class {served} has no place for it"
    detail = f"tensor {load.name} of shape {list(load.shape)}: {why}"
    return ModelFolderError(path=str(load.folder), detail=detail, advice=_ADVICE)


def _incomplete(load: _Load, unfilled: _Gaps) -> ModelFolderError:
    name, parameter, gap = unfilled[0]
    advice = _NO_HEAD if [name for name, _, _ in unfilled] == ["lm_head.weight"] else _ADVICE
    count = f"({len(unfilled)} parameters in all)"
    if gap == (0, parameter.numel()):
        whole = [name for name, tensor, missing in unfilled if missing == (0, tensor.numel())]
        shown = ", ".join(whole[:_SHOWN]) + (", ..." if len(whole) > _SHOWN else "")
        detail = f"its files have no values for {shown} {count}"
    else:
        held = ", ".join(load.written.sources(parameter)[:_SHOWN])
        detail = (
            f"its files have only a part of {name}: {gap[1] - gap[0]} of its {parameter.numel()} elements are missing, "
            f"from element {gap[0]} on {count}; the files have {held}"
        )
    return ModelFolderError(path=str(load.folder), detail=detail, advice=advice)
