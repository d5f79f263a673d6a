"""LMDeploy's first question in its Ascend workers: can the runtime be used?"""

from dlinfer.errors import VendorUnavailableError
from dlinfer.vendor.ascend import sdk


def ensure_ascend_runtime() -> None:
    """Load torch_npu, and look for a card. Raises VendorUnavailableError where it does not fit torch, or one of them is
    missing."""
    probed = sdk.probe()
    if not probed.available:
        raise VendorUnavailableError(vendor="ascend", reason=probed.reason, advice=probed.next_step)
