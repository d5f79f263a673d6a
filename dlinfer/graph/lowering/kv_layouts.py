"""The layout of KV caches that a compiled graph was compiled for.

The active vendor chooses the layout. A compiled graph keeps its kernels, and each kernel reads caches in the layout of
its vendor. If a model reads the layout through dlinfer's Python calls, Dynamo adds a guard on it. In addition, every
compiled graph checks the layout at each call.
"""

from collections.abc import Mapping

from torch import Tensor, fx

from dlinfer.errors import KVLayoutChangedError
from dlinfer.graph.ir.dialect import arguments, fake, overload
from dlinfer.ops.attention.kv_cache import kv_order
from dlinfer.vendor import discovery


def kv_layouts_of(graph: fx.Graph) -> dict[str, str]:
    """Return device type -> order of the KV caches' dimensions, for each type of device that holds a KV cache."""
    devices: set[str] = set()
    for node in graph.nodes:
        op = overload(node)
        if op is None or not op.namespace.startswith("dlinfer"):
            continue
        cache = arguments(node).get("k_cache")
        if isinstance(cache, fx.Node) and isinstance(fake(cache), Tensor):
            devices.add(fake(cache).device.type)
    return {device: kv_order(device) for device in sorted(devices)}


def check_kv_layouts(made_for: Mapping[str, str]) -> None:
    """Raise KVLayoutChangedError if a device's layout of KV caches differs from ``made_for``."""
    for device, order in made_for.items():
        if discovery.kv_orders.get(device) != order and (now := kv_order(device)) != order:
            vendor = discovery.active(device)
            raise KVLayoutChangedError(
                made_for=order, given=now, vendor="none" if vendor is None else vendor.name, device=device
            )
