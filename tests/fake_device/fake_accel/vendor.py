"""The vendor of the fake device. Its own name, torch's name of the device and frameworks' name of it all differ."""

from collections.abc import Mapping
from typing import Any

from dlinfer.vendor import Device, KVCacheLayout, Probe, Vendor
from dlinfer.vendor.base import Kernel

LAYOUT = KVCacheLayout("BHSD")


def _kernels() -> Mapping[str, Kernel]:
    from fake_accel.kernels import KERNELS

    return KERNELS


def _engine(name: str) -> Any:
    from fake_accel.engine import FakeEngine

    return FakeEngine()


def _device() -> Device:
    from fake_accel.device import FakeDevice

    return FakeDevice()


VENDOR = Vendor(
    name="fakecorp",
    device_type="fakeaccel",
    framework_device="fakecard",
    summary="a device of tests, whose memory is the host's",
    probe=lambda: Probe(True, "needs no hardware"),
    load_kernels=_kernels,
    load_device=_device,
    kv_cache_layout=LAYOUT,
    engines=("fakegraphs",),
    default_engine="fakegraphs",
    load_engine=_engine,
)
