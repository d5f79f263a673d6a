"""The check of the runtime that LMDeploy's Ascend workers call first."""

from dlinfer.errors import VendorUnavailableError
from dlinfer.vendor.ascend import sdk


def ensure_ascend_runtime() -> None:
    """Load torch_npu and look for a card. Raises VendorUnavailableError if that fails."""
    probed = sdk.probe()
    if not probed.available:
        raise VendorUnavailableError(vendor="ascend", reason=probed.reason, advice=probed.next_step)
