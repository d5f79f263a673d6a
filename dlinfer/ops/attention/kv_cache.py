"""The paged KV cache in the vendor's layout, and views of a cache in the canonical order of dimensions.

A cache holds blocks of ``block_size`` slots; slot ``block * block_size + offset`` keeps one token's keys (or values) of
all KV heads. The active vendor chooses the order of the dimensions in memory (``Vendor.kv_cache_layout``).
"""

from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.vendor import KVCacheLayout, discovery


def canonical(cache: Tensor) -> Tensor:
    """Return a view [blocks, block_size, kv_heads, head_size] of ``cache``, which is in the vendor's layout."""
    order = kv_order(cache.device.type)
    return cache if order == KVCacheLayout.order else KVCacheLayout(order).canonical(cache)


def kv_order(device_type: str) -> str:
    """Return the order of a cache's dimensions under the device's active vendor, such as "BSHD".

    If no vendor is active, this activates the default one. Dynamo guards on the order, so traced code that calls this
    function is recompiled when the order changes.
    """
    _activate(device_type)
    return discovery.kv_orders.get(device_type, KVCacheLayout.order)


def guard_layout(cache: Tensor) -> None:
    """Make Dynamo guard on the layout of ``cache``, so that the model is recompiled when the vendor's layout changes.

    Dynamo guards only on values that a branch depends on. So this function has a branch on the layout.
    """
    if kv_order(cache.device.type) == "":
        raise AssertionError("a layout names its dimensions")


def _activate(device_type: str) -> None:
    if device_type not in discovery.kv_orders:
        discovery.activate_default(device_type)


# Dynamo cannot follow the search for plugins, so the search must end before Dynamo reads what it guards. This is all
# that torch.compiler.assume_constant_result does, except that it imports Dynamo, which costs a second in eager mode.
_activate._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def packed(x: Tensor) -> Tensor:
    """Return a view [tokens, heads, size] if x is [1, tokens, heads, size]; return any other x unchanged."""
    return x[0] if x.dim() == 4 and x.shape[0] == 1 else x


_RULES = Rules("fill_kv_cache")


def check_slots(kv_start_indices: Tensor, keys: Tensor) -> None:
    """Raise OpArgumentError if a slot lies past the end of ``keys``, a cache in the canonical order.

    The check reads the slots' values, so only kernels call it; fake tensors have no values.
    """
    slots = keys.shape[0] * keys.shape[1]
    if kv_start_indices.numel():
        highest = int(kv_start_indices.max())
        _RULES.require(highest < slots, "kv_start_indices", lambda: f"slots below {slots}", lambda: highest)
