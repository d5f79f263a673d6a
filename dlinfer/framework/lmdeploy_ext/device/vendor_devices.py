"""Checks LMDeploy's device types against the installed vendor packages, and activates a device's vendor.

LMDeploy accepts ascend, maca and camb on any machine, and looks for their kernels, versions and graph runners inside
``dlinfer``. But the vendor's own package provides them, and registers itself under the device's name as an entry point
in ``dlinfer.vendors``. Without the vendor's package LMDeploy would raise a ModuleNotFoundError, or start without
kernels. If the vendor has a ``load_device``, dlinfer's adaptor serves the device. Otherwise LMDeploy runs its own
backend on the device.
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
    """Raise DeviceWithoutVendorError for a device type that needs a vendor's package, if that is not installed."""
    if device_type in NEED_VENDOR and device_type not in discovery.names():
        raise DeviceWithoutVendorError(device=device_type, group=discovery.GROUP)


def check_available(device_type: str) -> None:
    """Raise VendorUnavailableError for a device type of ours, if its vendor finds no usable device on this machine."""
    vendor = vendor_of(device_type)
    if vendor is not None and not (probe := discovery.probe(vendor)).available:
        raise VendorUnavailableError(vendor=vendor.name, reason=probe.reason, advice=probe.next_step)


def vendor_device_init(device_type: str) -> None:
    """Activate the vendor of ascend, maca or camb. Call this before LMDeploy's own backend for the device starts.

    LMDeploy expects that importing ``dlinfer.framework.lmdeploy_ext.device`` activates the vendor, and later reads
    ``dlinfer.vendor.vendor_name``. Raises DeviceWithoutVendorError and the errors of ``dlinfer.vendor.use``.
    """
    check_vendor(device_type)
    if device_type in NEED_VENDOR:
        discovery.use(device_type)


def lacks_cuda(device_type: str) -> bool:
    """Return whether ``device_type`` is "cuda" and torch sees no CUDA device, but the host can serve instead."""
    return device_type == "cuda" and not torch.cuda.is_available() and HOST in served()


def without_cuda(device_type: str) -> str:
    """Return ``device_type``, or a replacement for "cuda" if torch sees no CUDA device.

    The replacement is the device that is already active, or else the host. A warning names it.
    """
    if not lacks_cuda(device_type):
        return device_type
    instead = activation.active() or HOST
    activation.show_notices()
    logger.warning(
        "torch sees no CUDA device, which LMDeploy uses by default. LMDeploy runs on device_type %r instead",
        instead,
    )
    return instead


def usable() -> list[str]:
    """Return the device types that a user can choose on this machine, including those that LMDeploy serves itself."""
    installed = [name for name in NEED_VENDOR if name in discovery.names()]
    left_to_lmdeploy = [name for name in installed if discovery.get(name).load_device is None]
    return list(dict.fromkeys([*served(), "cuda", *left_to_lmdeploy]))
