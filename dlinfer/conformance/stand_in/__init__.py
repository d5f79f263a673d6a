"""A torch device that needs no hardware: the host's memory under a name of its own, with every op of ATen.

A package of a vendor stands on it until it has a device, and its kernels run in a CI that has none. ``install(name)``
makes it, once a process: torch gives its key PrivateUse1 to one device.
"""

from dlinfer.conformance.stand_in.memory import TOTAL, free, on_host
from dlinfer.conformance.stand_in.torch_device import Module, install, to_device, why_not

__all__ = ["TOTAL", "Module", "free", "install", "on_host", "to_device", "why_not"]
