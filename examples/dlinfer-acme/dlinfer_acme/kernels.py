"""The vendor's kernels: parameters as the ops have them (``dlinfer.ops``), one function an op.

A kernel refuses a call by ``@refuses(rule)`` (``dlinfer.vendor.base``) or, where only values tell, by raising
``dlinfer.errors.KernelDeclined`` before it writes anything: the reference then answers, and that is counted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.conformance.stand_in import on_host, to_device
from dlinfer.ops.attention.kv_cache import canonical, check_slots
from dlinfer.vendor.base import Kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = on_host(x).float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return to_device((on_host(weight) * (wide * scale).to(x.dtype)).contiguous())


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = on_host(x).chunk(2, -1)
    return to_device((F.silu(gate) * up).contiguous())  # silu(gate) is rounded to x's dtype, as the op says


def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    check_slots(kv_start_indices, canonical(k_cache))  # before anything is written
    slots = on_host(kv_start_indices).long()
    written = slots >= 0
    for new, cache in ((k, k_cache), (v, v_cache)):
        seen = on_host(canonical(cache))
        block, place = slots[written] // seen.shape[1], slots[written] % seen.shape[1]
        seen[block, place] = on_host(new)[written]


KERNELS: dict[str, Kernel] = {kernel.__name__: kernel for kernel in (rms_norm, silu_and_mul, fill_kv_cache)}
