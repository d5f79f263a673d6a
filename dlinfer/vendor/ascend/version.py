"""What LMDeploy asks before anything else of Ascend in its workers: whether the runtime is fit to be used."""

from dlinfer.errors import VendorUnavailableError
from dlinfer.vendor.ascend import sdk


def ensure_ascend_runtime() -> None:
    """Load torch_npu, and look for a card. Raises VendorUnavailableError where it does not fit torch, or one of them is
    missing."""
    found = sdk.probe()
    if not found.available:
        raise VendorUnavailableError(vendor="ascend", reason=found.reason, advice=found.next_step)
