"""Vendors of kernels for the fused ops: the installed ones, and the active one of each device type.

LMDeploy reads ``vendor_name`` to learn which vendor's kernels it runs on.
"""

import sys
from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.vendor.base import KVCacheLayout, Probe, Vendor
from dlinfer.vendor.claims import Claim
from dlinfer.vendor.device import Device, DeviceMemory
from dlinfer.vendor.discovery import activate_default, active, get, names, use

__all__ = [
    "Claim",
    "Device",
    "DeviceMemory",
    "KVCacheLayout",
    "Probe",
    "Vendor",
    "activate_default",
    "active",
    "get",
    "names",
    "use",
]

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise UnsupportedFeatureError(
        feature="CPython without its global interpreter lock",
        where="dlinfer",
        advice="set PYTHON_GIL=1, or use CPython's default build.",
    )


def __getattr__(name: str) -> Any:
    if name == "vendor_name":
        from dlinfer.vendor.discovery import most_recent

        return most_recent()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
