"""MetaX cards: LMDeploy's ops run eagerly on MetaX's mcoplib, flash_attn and Triton.

The kernels were tested against MetaX's published schemas and sources, not on a card; docs/vendors/maca.md has the
details for each op. LMDeploy calls the device "maca". torch calls it "cuda", since MetaX's build of torch imitates
CUDA's. MetaX's packages are loaded with the first kernel.
"""

from collections.abc import Mapping

from dlinfer.vendor.base import Kernel, KVCacheLayout, Probe, Vendor
from dlinfer.vendor.claims import Claim, Claims, Proofs
from dlinfer.vendor.device import Device
from dlinfer.vendor.maca.torch_name import DEVICE_TYPE

BLOCK_SIZE = 64
"""Slots in a block of the KV cache. flash_attn takes any multiple of 16, flash_mla only 64. Without this number,
LMDeploy would use blocks of 32 slots for latent caches.
"""


def _probe() -> Probe:
    from dlinfer.vendor.maca import sdk

    return sdk.probe()


def _kernels() -> Mapping[str, Kernel]:
    from dlinfer.vendor.maca import sdk

    sdk.load()
    from dlinfer.vendor.maca.kernels import KERNELS

    return KERNELS


def _device() -> Device:
    from dlinfer.vendor.maca.device import MacaDevice

    return MacaDevice()


def _claims() -> Claims:
    """Return claims for all kernels but weight_quant_matmul.

    That kernel calls awq_gemm, which rounds weights to 16 bits. The op does not allow this.
    """
    from dlinfer.vendor.maca.kernels import IN_HALVES, KERNELS
    from dlinfer.vendor.maca.refusing import FLOATS, HALVES

    served = {op: HALVES if op in IN_HALVES else FLOATS for op in KERNELS if op != "weight_quant_matmul"}
    return {op: Claim(dtypes, in_part=True) for op, dtypes in served.items()}


def _proofs() -> Proofs:
    from dlinfer.vendor.maca.proofs import PROOFS

    return PROOFS


VENDOR = Vendor(
    name="maca",
    device_type=DEVICE_TYPE,
    framework_device="maca",
    summary=(
        "MetaX cards through mcoplib and flash_attn; checked against the vendor's sources, never on a card"
    ),
    probe=_probe,
    load_kernels=_kernels,
    load_device=_device,
    claims=_claims,
    proofs=_proofs,
    kv_cache_layout=KVCacheLayout("BSHD", block_size=BLOCK_SIZE),
)
