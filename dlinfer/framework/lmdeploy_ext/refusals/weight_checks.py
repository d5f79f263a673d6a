"""Parameters that no checkpoint file gave a value to are named, as HF transformers names them.

LMDeploy allocates parameters without initialising them and never looks whether all were loaded, so that a checkpoint
that lacks a tensor generates garbage in silence. Sharded checkpoints are compared with their index before
(``model_checks.py``); this sees every kind. It is a warning and not an error, as a model class may fill a parameter
by a way of its own.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Patch

logger = logging.getLogger("dlinfer")

_SHOWN = 3

_loaded: set[int] = set()
"""Identities of the parameters loaded so far; only filled while a model loads, which keeps them alive."""


def _load_weight(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_weight(param: torch.nn.Parameter, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        _loaded.add(id(param))
        original(param, loaded_weight, **kwargs)

    return load_weight


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
        before = dict(model.named_parameters())
        _loaded.clear()
        try:
            original(model, checkpoint_path, prefix, device)
            missing = _missing(before, dict(model.named_parameters()))
        finally:
            _loaded.clear()
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            logger.warning(
                "parameters that got no value from %s and hold whatever was in memory: %s (%d in all). The checkpoint "
                "is incomplete, or does not fit the model's class.",
                checkpoint_path,
                shown,
                len(missing),
            )

    return load_model_weights


def _missing(before: dict[str, torch.nn.Parameter], after: dict[str, torch.nn.Parameter]) -> list[str]:
    """Names that were not loaded, but for those that share a loaded one's memory afterwards, as tied weights do."""
    loaded = {name for name, param in before.items() if id(param) in _loaded}
    filled = {after[name].data_ptr() for name in loaded if name in after}
    rest = [name for name in before if name not in loaded and name in after]
    return [name for name in rest if after[name].data_ptr() not in filled]


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.weight_loader.model_weight_loader:load_weight",
        why="the one place that every parameter is loaded through; noted there",
        signature="(param, loaded_weight, **kwargs)",
        build=_load_weight,
        essential=False,
    ),
    Patch(
        target="lmdeploy.pytorch.weight_loader.model_weight_loader:load_model_weights",
        why="leaves parameters that the checkpoint lacks uninitialised, without a word",
        signature="(model, checkpoint_path, prefix=None, device=None)",
        build=_load_model_weights,
        essential=False,
    ),
)
