"""Finds which of LMDeploy's device types this adaptor serves. It serves a type if a vendor offers it to frameworks."""

from dlinfer import settings
from dlinfer.vendor import Vendor, discovery

OWN = ("cuda", "ascend", "maca", "camb")
"""The device types that LMDeploy 0.18 itself accepts. We serve all but cuda, if their vendor supports frameworks."""


def vendor_of(device_type: str) -> Vendor | None:
    """Return the vendor whose device this adaptor serves as ``device_type``; None for "cuda", or if no vendor has it.

    Raises VendorLoadError or VendorClashError if the vendor named ``device_type`` fails to load.
    """
    if device_type == "cuda":
        return None
    named = discovery.get(device_type) if device_type in discovery.names() else None
    if named is not None and named.puts_frameworks_on(device_type):
        return named
    others = [vendor for vendor in discovery.loadable() if vendor.puts_frameworks_on(device_type)]
    return max(others, key=lambda vendor: vendor.priority, default=None)


def serves(device_type: str) -> bool:
    return vendor_of(device_type) is not None


def torch_device(device_type: str) -> str:
    """Return torch's name of the device for ``device_type``, which must be one of ours."""
    vendor = vendor_of(device_type)
    assert vendor is not None, "callers know that the device_type is ours"
    return vendor.device_type


def shares_host(device_type: str) -> bool:
    """Return whether a device of ours uses the host's memory, as a CPU does, and is not a card."""
    return serves(device_type) and discovery.device(torch_device(device_type)).memory().shared


def reserved_rows(device_type: str | None) -> int:
    """Return how many rows each LoRA layer reserves for adapters that are loaded while an engine runs.

    device_type: LMDeploy's device_type of the engine; None if it runs on no device of ours.
    """
    rows = settings.current().cpu_adapter_rows or 0
    return rows if rows and device_type is not None and shares_host(device_type) else 0


def served() -> list[str]:
    """Return all device types that this adaptor serves and that work on this machine, sorted."""
    vendors = (vendor for vendor in discovery.loadable() if vendor.load_device is not None)
    return sorted({each.framework_device or each.name for each in vendors if discovery.probe(each).available})
