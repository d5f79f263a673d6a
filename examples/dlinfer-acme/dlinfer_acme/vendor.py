"""Who the vendor is. Kernels, device and engine are imported when they are first asked for."""

from collections.abc import Mapping
from typing import Any

from dlinfer.vendor import Claim, Device, Probe, Vendor
from dlinfer.vendor.base import Kernel

from .torch_device import NAME


def _probe() -> Probe:
    """Whether it can run here; cheap, and never raises. Say what is missing, and what to do about it."""
    from dlinfer.conformance import stand_in

    reason = stand_in.why_not(NAME)
    if reason is not None:
        return Probe(False, reason, "use an environment without the package of the other device")
    return Probe(True, "a stand-in, which needs no hardware")


def _kernels() -> Mapping[str, Kernel]:
    from .kernels import KERNELS

    return KERNELS


def _claims() -> Mapping[str, Claim]:
    """What ``dlinfer conformance`` holds the vendor to: these ops, every sample of every dtype."""
    return {"rms_norm": Claim(), "silu_and_mul": Claim(), "fill_kv_cache": Claim()}


def _device() -> Device:
    from .device import TheDevice

    return TheDevice()


def _engine(name: str) -> Any:
    from .engine import TheEngine

    return TheEngine()


VENDOR = Vendor(
    name=NAME,
    device_type=NAME,
    summary="a device whose memory is the host's, to be replaced",
    probe=_probe,
    load_kernels=_kernels,
    claims=_claims,
    load_device=_device,
    engines=(f"{NAME}_graphs",),
    default_engine=f"{NAME}_graphs",
    load_engine=_engine,
    interface=1,  # the version of dlinfer.vendor.base.INTERFACE that this is written for
)
