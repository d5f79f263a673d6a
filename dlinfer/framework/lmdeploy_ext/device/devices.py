"""Which of LMDeploy's device types are this adaptor's: those whose vendor says what a framework needs of its device."""

from dlinfer.vendor import Vendor, discovery

OWN = ("cuda", "ascend", "maca", "camb")
"""The device types that LMDeploy 0.18 itself accepts. One but cuda is ours where its vendor puts frameworks on it."""


def vendor_of(device_type: str) -> Vendor | None:
    """The vendor that makes a device_type ours; None where none does. cuda is always LMDeploy's: no vendor is loaded.

    Raises VendorLoadError and VendorClashError of the vendor that has the device's name.
    """
    if device_type == "cuda":
        return None
    named = discovery.get(device_type) if device_type in discovery.names() else None
    if named is not None and named.puts_frameworks_on(device_type):
        return named
    others = [vendor for vendor in discovery.loadable() if vendor.puts_frameworks_on(device_type)]
    return max(others, key=lambda vendor: vendor.priority, default=None)


def serves(device_type: str) -> bool:
    """Whether a device_type is ours."""
    return vendor_of(device_type) is not None


def torch_device(device_type: str) -> str:
    """torch's name of the device that a device_type of ours means."""
    vendor = vendor_of(device_type)
    assert vendor is not None, "callers know that the device_type is ours"
    return vendor.device_type


def served() -> list[str]:
    """Every device_type of ours that works on this machine."""
    vendors = (vendor for vendor in discovery.loadable() if vendor.load_device is not None)
    return sorted({each.framework_device or each.name for each in vendors if discovery.probe(each).available})
