"""The fake device's own kernels: some ops in its memory. It counts their calls; all other ops have none."""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.conformance.stand_in import on_host, to_device
from dlinfer.ops.attention.kv_cache import check_slots
from dlinfer.vendor.base import Kernel, refuses
from fake_accel.vendor import LAYOUT

calls: Counter[str] = Counter()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    calls["rms_norm"] += 1
    wide = on_host(x).float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return to_device((on_host(weight) * (wide * scale).to(x.dtype)).contiguous())


def silu_and_mul(x: Tensor) -> Tensor:
    calls["silu_and_mul"] += 1
    gate, up = on_host(x).chunk(2, -1)
    return to_device((F.silu(gate) * up).contiguous())


@refuses(lambda x, weight, bias: "float64 is not served" if x.dtype is torch.float64 else None)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    calls["linear"] += 1
    return to_device(F.linear(on_host(x), on_host(weight), None if bias is None else on_host(bias)))


def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    calls["fill_kv_cache"] += 1
    keys, values = LAYOUT.canonical(on_host(k_cache)), LAYOUT.canonical(on_host(v_cache))
    check_slots(kv_start_indices, keys)
    slots = on_host(kv_start_indices).long()
    for new, cache in ((k, keys), (v, values)):
        kept = slots[slots >= 0]
        cache[kept // cache.shape[1], kept % cache.shape[1]] = on_host(new)[slots >= 0]


KERNELS: dict[str, Kernel] = {
    kernel.__name__: kernel for kernel in (rms_norm, silu_and_mul, linear, fill_kv_cache)
}
