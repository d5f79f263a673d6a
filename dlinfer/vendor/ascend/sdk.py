"""The vendor's torch_npu: whether it is here, whether a card is, and its ops once it is loaded.

A process without it pays for a look on sys.path. The ops are asked by their schemas' names, ``torch.ops.npu``: what
stands behind them, the vendor's binaries or a simulation, is no concern of the kernels.
"""

import importlib
import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.ascend import diagnosis
from dlinfer.vendor.base import Probe

NEEDED = "npu_rms_norm"
"""An op that every torch_npu has: whether it is registered tells whether torch_npu is loaded."""


def loaded() -> bool:
    """Whether the vendor's ops are registered in this process."""
    return hasattr(torch.ops.npu, NEEDED)


def load() -> None:
    """Register the vendor's ops. Raises ImportError with torch_npu's own words where its driver is missing."""
    if not loaded():
        importlib.import_module("torch_npu")


def cards() -> Any:
    """``torch.npu``: the vendor's module of streams, memory and properties. Loads torch_npu."""
    load()
    return sys.modules["torch"].npu  # pyright: ignore[reportAttributeAccessIssue]


def weak_reference(tensor: Tensor) -> Tensor:
    """A tensor that lies where ``tensor`` does and keeps no memory, as torch_npu's own graphs remember arguments."""
    return sys.modules["torch_npu"]._C._weak_ref_tensor(tensor)


def probe() -> Probe:
    """Whether a card can be used here; loads torch_npu only where it is installed and fits torch. Never raises."""
    if not loaded() and importlib.util.find_spec("torch_npu") is None:
        return diagnosis.not_installed()
    misfit = diagnosis.other_version()
    if misfit is not None:
        return misfit
    try:
        count = cards().device_count()
    except Exception as cause:  # noqa: BLE001 - a driver's failure may be any; it is the answer
        return diagnosis.not_loaded(cause)
    return Probe(True, f"{count} NPU(s)") if count else diagnosis.no_cards()
