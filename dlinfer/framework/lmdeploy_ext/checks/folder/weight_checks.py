"""A checkpoint that does not fill its model is refused before a weight is read.

LMDeploy allocates parameters without initialising them and never looks whether all were loaded, so that a checkpoint
that lacks a tensor generates garbage in silence.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder import dry_load
from dlinfer.framework.lmdeploy_ext.checks.folder.model_checks import in_short
from dlinfer.framework.lmdeploy_ext.conversion.plan import is_packed_as_it_loads
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Patch

_COPIES = "dlinfer_builds_copy"


def note_copy(model: Any, build: Callable[..., Any], config: Any, context: Any) -> None:
    """Note on a model how to build it again without memory, as it is in its files.

    build: LMDeploy's ``build_patched_model``, which made it of config and context.
    """
    from lmdeploy.pytorch.devices import get_device_manager
    from lmdeploy.pytorch.distributed import get_dist_manager

    device, ranks = get_device_manager().current_context(), get_dist_manager().current_context()
    assert device is not None and ranks is not None, "LMDeploy sets both before it builds a model"

    def build_again() -> Any:
        with get_dist_manager().context(ranks), get_device_manager().context(device):
            return _copy(build, config, context)

    setattr(model, _COPIES, build_again)


def _copy(build: Callable[..., Any], config: Any, context: Any) -> Any:
    if is_packed_as_it_loads(getattr(config.hf_config, "quantization_config", None)):
        from lmdeploy.pytorch.config import QuantizationConfig

        config = copy.copy(config)
        config.hf_config = copy.deepcopy(config.hf_config)
        del config.hf_config.quantization_config
        context = dataclasses.replace(context, quant_config=QuantizationConfig())
    return build(config, torch.device("meta"), context)


def check(model: Any, folder: Path) -> None:
    """Raise ModelFolderError unless a folder's tensors fill a model that ``note_copy`` knows, and all fit."""
    dry_load.check(folder, model.__dict__.pop(_COPIES))


def _load_model_weights(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_model_weights(
        model: torch.nn.Module,
        checkpoint_path: str,
        prefix: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        if activation.active() is None:
            original(model, checkpoint_path, prefix, device)
            return
        check(model, Path(checkpoint_path))
        try:
            original(model, checkpoint_path, prefix, device)
        except (AssertionError, KeyError, ValueError) as error:  # values that LMDeploy's loaders compare
            detail = f"LMDeploy cannot load its weights ({in_short(error)})"
            advice = "see that config.json belongs to these weights"
            raise ModelFolderError(path=checkpoint_path, detail=detail, advice=advice) from error

    return load_model_weights


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.weight_loader.model_weight_loader:load_model_weights",
        why="leaves parameters that the checkpoint lacks uninitialised, without a word",
        signature="(model, checkpoint_path, prefix=None, device=None)",
        build=_load_model_weights,
    ),
)
