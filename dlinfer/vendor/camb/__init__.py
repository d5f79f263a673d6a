"""Cambricon MLUs: LMDeploy's ops run eagerly on the vendor's torch_mlu_ops.

The kernels were tested against published signatures and documents, not on a card; docs/vendors/camb.md has the details
for each op. torch_mlu_ops is loaded with the first kernel. torch calls the device "mlu", LMDeploy "camb".
"""

from collections.abc import Mapping

from dlinfer.vendor.base import Kernel, KVCacheLayout, Probe, Vendor
from dlinfer.vendor.camb.layouts import BLOCK_SIZE
from dlinfer.vendor.claims import Claims, Proofs
from dlinfer.vendor.device import Device


def _probe() -> Probe:
    from dlinfer.vendor.camb import sdk

    return sdk.probe()


def _kernels() -> Mapping[str, Kernel]:
    from dlinfer.vendor.camb import sdk

    sdk.load()
    from dlinfer.vendor.camb.kernels import KERNELS

    return KERNELS


def _claims() -> Claims:
    from dlinfer.vendor.camb.kernels import CLAIMS

    return CLAIMS


def _device() -> Device:
    from dlinfer.vendor.camb.device import CambDevice

    return CambDevice()


def _proofs() -> Proofs:
    from dlinfer.vendor.camb.proofs import PROOFS

    return PROOFS


VENDOR = Vendor(
    name="camb",
    device_type="mlu",
    framework_device="camb",
    summary=(
        "Cambricon MLUs through torch_mlu_ops; checked against published signatures and documents, "
        "never on a card"
    ),
    probe=_probe,
    load_kernels=_kernels,
    load_device=_device,
    kv_cache_layout=KVCacheLayout("BHSD", block_size=BLOCK_SIZE),
    claims=_claims,
    proofs=_proofs,
    interface=1,
)
