"""MetaX's packages: load them, and find out whether they and a card can be used here.

On a machine without these packages, the search for them imports nothing. mcoplib's ops have vLLM's names, in
``torch.ops._C``, ``torch.ops._C_cache_ops`` and ``torch.ops._moe_C``. Rotation and attention are plain functions. Tests
define stand-ins for the ops and functions.
"""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch

from dlinfer.vendor.base import Probe
from dlinfer.vendor.maca.torch_name import DEVICE_TYPE

LIBRARIES = {"mcoplib._C": ("_C", "rms_norm"), "mcoplib._moe_C": ("_moe_C", "topk_softmax")}
"""Maps a module to its namespace in torch.ops and one of its ops. If that op is registered, the module is loaded."""
PACKAGES = ("mcoplib", "flash_attn")


def load() -> None:
    """Register mcoplib's ops unless they are registered. Raises ImportError with the packages' own message."""
    for module, (space, op) in LIBRARIES.items():
        if not hasattr(getattr(torch.ops, space), op):
            importlib.import_module(module)
    lmdeploy_ops()
    flash_attn()


@cache
def lmdeploy_ops() -> ModuleType:
    """Return mcoplib's functions for LMDeploy. pybind11 bound them without argument names, so call them by position."""
    return importlib.import_module("mcoplib.lmdeploy")


@cache
def flash_attn() -> ModuleType:
    return importlib.import_module("flash_attn")


@cache
def has_flash_mla() -> bool:
    """Return whether MetaX's FlashMLA is installed. Few models need it."""
    return importlib.util.find_spec("flash_mla") is not None


@cache
def flash_mla() -> ModuleType:
    return importlib.import_module("flash_mla")


@cache
def has_triton() -> bool:
    """Return whether Triton is installed. MetaX ships it with its torch."""
    return importlib.util.find_spec("triton") is not None


def cards() -> Any:
    """Return ``torch.cuda``, torch's module of the cards' streams, memory and properties."""
    return torch.get_device_module(DEVICE_TYPE)


def capturing() -> bool:
    """Return whether a graph is being captured. During a capture, nothing may be read from the card."""
    return bool(cards().is_current_stream_capturing())


def probe() -> Probe:
    """Return whether a card can be used here. Looks for the packages without loading them. Never raises."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return Probe(
                False,
                f"{package} is not installed",
                "use MetaX's container with torch, mcoplib and flash_attn for MACA (docs/vendors/maca.md)",
            )
    try:
        count = cards().device_count() if cards().is_available() else 0
    except Exception as cause:  # noqa: BLE001 - a driver's failure may be any; it is the answer
        first = str(cause).strip().partition("\n")[0]
        return Probe(
            False,
            f"torch failed to look for cards: {type(cause).__name__}: {first}",
            "check that mx-smi lists the cards, and that MACA_PATH is set",
        )
    if not count:
        return Probe(
            False, "torch sees no card", "check that mx-smi lists the cards, and that torch is MetaX's build"
        )
    return Probe(True, f"{count} card(s)")
