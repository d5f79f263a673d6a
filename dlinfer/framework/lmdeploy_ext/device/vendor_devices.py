"""Checks LMDeploy's device types against the installed vendor packages, and activates a device's vendor.

LMDeploy accepts ascend, maca and camb on any machine, and looks for their kernels, versions and graph runners inside
``dlinfer``. But a vendor's own package has them; it registers an entry point with the device's name in
``dlinfer.vendors``. Without that package LMDeploy would raise a ModuleNotFoundError, or start without kernels. If the
vendor has a ``load_device``, dlinfer's adaptor serves the device. Otherwise LMDeploy runs its own backend for it.
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
    """Raise VendorUnavailableError for a device type of ours if its vendor finds no usable device here."""
    vendor = vendor_of(device_type)
    if vendor is not None and not (probe := discovery.probe(vendor)).available:
        raise VendorUnavailableError(vendor=vendor.name, reason=probe.reason, advice=probe.next_step)


def vendor_device_init(device_type: str) -> None:
    """Activate the vendor of ascend, maca or camb before LMDeploy's own backend for the device starts.

    LMDeploy expects that the import of ``dlinfer.framework.lmdeploy_ext.device`` does this, and later reads
    ``dlinfer.vendor.vendor_name``. Raises DeviceWithoutVendorError and the errors of ``dlinfer.vendor.use``.
    """
    check_vendor(device_type)
    if device_type in NEED_VENDOR:
        discovery.use(device_type)


def lacks_cuda(device_type: str) -> bool:
    """Return whether ``device_type`` is cuda, but torch sees no CUDA device, so that the host is to serve instead."""
    return device_type == "cuda" and not torch.cuda.is_available() and HOST in served()


def without_cuda(device_type: str) -> str:
    """Return the device type to run on. Without a CUDA device, LMDeploy's default "cuda" is replaced, with a log line.

    The replacement is the device that is already active, or else the host.
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
    """Return the device types that a user can choose on this machine."""
    installed = [name for name in NEED_VENDOR if name in discovery.names()]
    left_to_lmdeploy = [name for name in installed if discovery.get(name).load_device is None]
    return list(dict.fromkeys([*served(), "cuda", *left_to_lmdeploy]))
