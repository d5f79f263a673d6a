"""The vendor's torch_mlu and torch_mlu_ops: load them, and find out whether they and a card can be used here.

On a machine without these packages, the search for them imports nothing. ``torch_mlu_ops`` may also be a simulation.
"""

import importlib
import importlib.util
import sys
from typing import Any

from dlinfer.vendor.base import Probe

PACKAGES = ("torch_mlu", "torch_mlu_ops")
"""The packages in loading order: torch_mlu registers the device, torch_mlu_ops brings the ops."""

_ops: Any = None


def load() -> None:
    """Import the vendor's packages. Raises ImportError with their own message if a driver is missing."""
    global _ops
    for name in PACKAGES:
        _ops = importlib.import_module(name)


def tmo() -> Any:
    """Load and return the module torch_mlu_ops."""
    if _ops is None:
        load()
    return _ops


def cards() -> Any:
    """Load the packages and return ``torch.mlu``, the vendor's module of streams, memory and properties."""
    tmo()
    return sys.modules["torch"].mlu  # pyright: ignore[reportAttributeAccessIssue]


def probe() -> Probe:
    """Return whether a card can be used here; load the packages only if they are installed. Never raises."""
    for name in PACKAGES:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            return Probe(
                False,
                f"{name} is not installed",
                "install Cambricon's PyTorch, which has torch_mlu and torch_mlu_ops (docs/vendors/camb.md)",
            )
    try:
        count = cards().device_count()
    except Exception as cause:  # noqa: BLE001 - a driver's failure may be any; it is the answer
        first = str(cause).strip().partition("\n")[0]
        return Probe(
            False,
            f"torch_mlu_ops cannot be loaded: {type(cause).__name__}: {first}",
            "set NEUWARE_HOME and its library path, and check that torch_mlu_ops, torch_mlu and torch "
            "fit together",
        )
    if not count:
        return Probe(False, "torch_mlu sees no MLU", "check the driver with cnmon")
    return Probe(True, f"{count} MLU(s)")
