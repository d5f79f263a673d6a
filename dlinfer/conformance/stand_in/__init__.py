"""A torch device that needs no hardware: host memory under another device name, with every op of ATen.

A vendor's package uses the stand-in until it has its own torch device, and later to run its kernels in CI without
hardware. ``install(name)`` creates the device. A process can have only one stand-in, because torch gives its dispatch
key PrivateUse1 to only one device.
"""

from dlinfer.conformance.stand_in.memory import TOTAL, free, on_host
from dlinfer.conformance.stand_in.torch_device import Module, install, to_device, why_not

__all__ = ["TOTAL", "Module", "free", "install", "on_host", "to_device", "why_not"]
