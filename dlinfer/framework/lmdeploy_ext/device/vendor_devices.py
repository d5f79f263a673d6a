"""LMDeploy's device types that need a vendor's package: which can be used here, and errors about the others.

LMDeploy accepts ascend, maca and camb on any machine and looks for their kernels, versions and graph runners inside
``dlinfer``. This package holds the op interface for them. The rest is a vendor's, found by an entry point of the
device's name in ``dlinfer.vendors``. Without one LMDeploy would end in a ModuleNotFoundError, or start on nothing.
This adaptor puts LMDeploy on a device whose vendor says what a framework needs of it. On another, LMDeploy runs its own
backend for the device.
"""

import logging

import torch

from dlinfer.errors import DeviceWithoutVendorError, VendorUnavailableError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.devices import OWN, served, vendor_of
from dlinfer.vendor import discovery

logger = logging.getLogger("dlinfer")

HOST = "cpu"
NEED_VENDOR = tuple(name for name in OWN if name != "cuda")


def check_vendor(device_type: str) -> None:
    """Raise DeviceWithoutVendorError for a device type whose vendor's package is not installed."""
    if device_type in NEED_VENDOR and device_type not in discovery.names():
        raise DeviceWithoutVendorError(device=device_type, group=discovery.GROUP)


def check_available(device_type: str) -> None:
    """Raise VendorUnavailableError for a device type of ours whose vendor says that it cannot be used here."""
    vendor = vendor_of(device_type)
    if vendor is not None and not (probe := discovery.probe(vendor)).available:
        raise VendorUnavailableError(vendor=vendor.name, reason=probe.reason, advice=probe.next_step)


def vendor_device_init(device_type: str) -> None:
    """Activate the vendor of one of LMDeploy's own device types but cuda, before LMDeploy's backend for it starts.

    LMDeploy means this by importing ``dlinfer.framework.lmdeploy_ext.device``, and asks ``dlinfer.vendor.vendor_name``
    for it later. Raises DeviceWithoutVendorError, and what ``dlinfer.vendor.use`` raises.
    """
    check_vendor(device_type)
    if device_type in NEED_VENDOR:
        discovery.use(device_type)


def lacks_cuda(device_type: str) -> bool:
    """Whether a device type is cuda, torch sees no such device, and the host can serve instead."""
    return device_type == "cuda" and not torch.cuda.is_available() and HOST in served()


def without_cuda(device_type: str) -> str:
    """The device type that LMDeploy runs on where cuda, its default, is asked for and torch sees no such device.

    That is the host, or what this process runs on already; one line says so. Any other device type stays.
    """
    if not lacks_cuda(device_type):
        return device_type
    instead = activation.active() or HOST
    activation.show_notices()
    logger.warning(
        "torch sees no CUDA device, which is LMDeploy's default: running on device_type %r instead", instead
    )
    return instead


def usable() -> list[str]:
    """The device types that can be chosen here."""
    installed = [name for name in NEED_VENDOR if name in discovery.names()]
    left_to_lmdeploy = [name for name in installed if discovery.get(name).load_device is None]
    return list(dict.fromkeys([*served(), "cuda", *left_to_lmdeploy]))
