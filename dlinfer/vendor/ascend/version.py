"""What LMDeploy asks before anything else of Ascend in its workers: whether the runtime is fit to be used."""

import torch

from dlinfer.errors import VendorUnavailableError
from dlinfer.vendor.ascend import sdk

TESTED = "2.13.0"
"""The torch_npu whose schemas and documents the kernels are written for."""


def ensure_ascend_runtime() -> None:
    """Load torch_npu, and look for a card.

    Raises VendorUnavailableError where one of them is missing, and for a torch that torch_npu was not built for: its
    binaries follow torch's own, to the release.
    """
    found = sdk.probe()
    if not found.available:
        raise VendorUnavailableError(vendor="ascend", reason=found.reason, advice=found.next_step)
    there, here = _torch_npu_version(), torch.__version__.split("+")[0]
    if there and there.split("+")[0].split(".post")[0] != here:
        raise VendorUnavailableError(
            vendor="ascend",
            reason=f"torch_npu is {there} and torch {here}",
            advice="install releases of one version",
        )


def _torch_npu_version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return ""
