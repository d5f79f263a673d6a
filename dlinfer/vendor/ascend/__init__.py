"""Ascend NPUs: LMDeploy's ops run on the vendor's torch_npu, eagerly, or in graphs that the vendor's torchair compiles.

The kernels were tested against the vendor's real schemas and documents, not on a card; docs/vendors/ascend.md has the
details for each op. torch_npu is loaded with the first kernel. torch calls the device "npu", LMDeploy "ascend".
"""

from collections.abc import Mapping
from typing import Any

from dlinfer.vendor.base import Kernel, KVCacheLayout, Probe, Vendor
from dlinfer.vendor.claims import Proofs
from dlinfer.vendor.device import Device

BLOCK_SIZE = 128
"""Slots in a block of the KV cache. npu_fused_infer_attention_score reads no smaller blocks for prompts."""


def _probe() -> Probe:
    from dlinfer.vendor.ascend import sdk

    return sdk.probe()


def _kernels() -> Mapping[str, Kernel]:
    from dlinfer.vendor.ascend import sdk

    sdk.load()
    from dlinfer.vendor.ascend.kernels import KERNELS

    return KERNELS


def _engine(name: str) -> Any:
    from dlinfer.vendor.ascend.graph.engine import AscendEngine

    return AscendEngine()


def _device() -> Device:
    from dlinfer.vendor.ascend.device import AscendDevice

    return AscendDevice()


def _proofs() -> Proofs:
    from dlinfer.vendor.ascend.proofs import PROOFS

    return PROOFS


VENDOR = Vendor(
    name="ascend",
    device_type="npu",
    framework_device="ascend",
    summary=(
        "Ascend NPUs through torch_npu; checked against the vendor's schemas and documents, never on a card"
    ),
    probe=_probe,
    load_kernels=_kernels,
    load_device=_device,
    proofs=_proofs,
    engines=("ascend",),
    load_engine=_engine,
    kv_cache_layout=KVCacheLayout("BSHD", block_size=BLOCK_SIZE),
)
