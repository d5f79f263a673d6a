"""A whole vendor plugin, as somebody outside dlinfer would write it: one kernel, loaded when it is needed."""

from collections.abc import Mapping

from dlinfer.vendor import Probe, Vendor
from dlinfer.vendor.base import Kernel


def _probe() -> Probe:
    return Probe(True, "the mini vendor runs everywhere")


def _kernels() -> Mapping[str, Kernel]:
    from mini_vendor import kernels

    return {"rms_norm": kernels.rms_norm}


VENDOR = Vendor(
    name="mini",
    device_type="cpu",
    summary="one kernel that counts its calls",
    probe=_probe,
    load_kernels=_kernels,
    priority=-1,  # below dlinfer's own, so that it answers only when it is chosen
)
