"""A torch device that needs no hardware: the host's memory under another name, with every op of ATen.

A vendor's package uses the stand-in until it has its own torch device, and to run its kernels in a CI without hardware.
``install(name)`` creates the device, once in a process: torch gives its key PrivateUse1 to one device only.
"""

from dlinfer.conformance.stand_in.memory import TOTAL, free, on_host
from dlinfer.conformance.stand_in.torch_device import Module, install, to_device, why_not

__all__ = ["TOTAL", "Module", "free", "install", "on_host", "to_device", "why_not"]
