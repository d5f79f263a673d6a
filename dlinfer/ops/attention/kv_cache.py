"""The paged KV cache: how ops see it.

A cache holds blocks of ``block_size`` slots; slot ``block * block_size + offset`` keeps one token's keys (or
values) of all KV heads. The order of the dimensions in memory is the active vendor's choice
(``Vendor.kv_cache_layout``); ``canonical`` shows any of them as [blocks, block_size, kv_heads, head_size].
"""

from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.vendor import KVCacheLayout, discovery


def canonical(cache: Tensor) -> Tensor:
    """``cache`` seen as [blocks, block_size, kv_heads, head_size]; shares memory."""
    order = kv_order(cache.device.type)
    return cache if order == KVCacheLayout.order else KVCacheLayout(order).canonical(cache)


def kv_order(device_type: str) -> str:
    """How the device's active vendor orders the dimensions of a cache; makes the default vendor active if none is.

    Traced code that asks is compiled again when the answer changes: Dynamo guards what it reads.
    """
    _activate(device_type)
    return discovery.kv_orders.get(device_type, KVCacheLayout.order)


def guard_layout(cache: Tensor) -> None:
    """Let a model that is compiled with this call be compiled again when another vendor lays caches out otherwise.

    Dynamo guards only what a decision is made of, hence the comparison.
    """
    if kv_order(cache.device.type) == "":
        raise AssertionError("a layout names its dimensions")


def _activate(device_type: str) -> None:
    if device_type not in discovery.kv_orders:
        discovery.activate_default(device_type)


# Dynamo cannot follow the search for plugins, which has to be over before it reads what it guards. This is all that
# torch.compiler.assume_constant_result does, except that it imports Dynamo, a second for nothing in eager mode.
_activate._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def packed(x: Tensor) -> Tensor:
    """[1, tokens, heads, size] as [tokens, heads, size], sharing memory; anything else unchanged."""
    return x[0] if x.dim() == 4 and x.shape[0] == 1 else x


_RULES = Rules("fill_kv_cache")


def check_slots(kv_start_indices: Tensor, keys: Tensor) -> None:
    """No slot lies behind the end of the canonical cache ``keys``. Raises OpArgumentError.

    It reads the slots, so it is for kernels and not for fakes.
    """
    slots = keys.shape[0] * keys.shape[1]
    if kv_start_indices.numel():
        highest = int(kv_start_indices.max())
        _RULES.require(highest < slots, "kv_start_indices", lambda: f"slots below {slots}", lambda: highest)
