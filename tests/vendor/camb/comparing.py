"""Calls on a device whose caches lie otherwise than the oracle's on the host."""

from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.ops.core.spec import OpSpec
from dlinfer.vendor.camb import VENDOR
from tests.ops import cases

LAYOUT = VENDOR.kv_cache_layout
CACHES = (
    *("k_cache", "v_cache", "k_scales_zeros", "v_scales_zeros"),
    *("key", "value", "key_rope", "cache", "compressed"),
)
"""Arguments that lie as the vendor lays caches out, where they have four dimensions."""


def host(op: OpSpec, args: tuple) -> tuple:
    """Arguments for the oracle."""
    moved = pytree.tree_map_only(Tensor, lambda one: one.cpu().clone(), args)
    return tuple(
        LAYOUT.canonical(one) if name in CACHES and isinstance(one, Tensor) and one.dim() == 4 else one
        for name, one in zip(op.parameters, moved, strict=True)
    )


def found(op: OpSpec, args: tuple, returned: object) -> list[Tensor]:
    """What a call on the device has produced, caches as the oracle's lie."""
    shown = cases.results(op, args, returned)
    fresh = len(shown) - len(op.mutates)
    for place, name in enumerate(op.mutates, fresh):
        if name in CACHES and shown[place].dim() == 4:
            shown[place] = LAYOUT.canonical(shown[place])
    return shown
