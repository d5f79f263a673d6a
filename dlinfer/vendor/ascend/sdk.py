"""The vendor's torch_npu: load its ops, and find out whether it and a card can be used here.

Kernels call the ops through ``torch.ops``, so a simulation that registers the same ops can replace torch_npu.
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
"""An op that every torch_npu has. If this op is registered, torch_npu is loaded."""


def loaded() -> bool:
    """Return whether the vendor's ops are registered in this process."""
    return hasattr(torch.ops.npu, NEEDED)


def load() -> None:
    """Register the vendor's ops. Raises ImportError with torch_npu's own message if its driver is missing."""
    if not loaded():
        importlib.import_module("torch_npu")


def cards() -> Any:
    """Load torch_npu and return ``torch.npu``, its module of streams, memory and properties."""
    load()
    return sys.modules["torch"].npu  # pyright: ignore[reportAttributeAccessIssue]


def weak_reference(tensor: Tensor) -> Tensor:
    """Return a tensor at the same address that does not keep the memory alive. torch_npu's graphs hold such tensors."""
    return sys.modules["torch_npu"]._C._weak_ref_tensor(tensor)


def probe() -> Probe:
    """Return whether a card can be used here; load torch_npu only if it is installed and fits torch. Never raises."""
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
