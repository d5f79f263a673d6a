"""The layout of KV caches that a compiled graph was made for: the active vendor's, as long as that does not change.

Kernels are bound when a graph is compiled, and each reads caches as its vendor lays them out. Dynamo guards the layout,
where a model asks through dlinfer's Python calls, and compiles again; every compiled graph compares it at each call.
"""

from collections.abc import Mapping

from torch import Tensor, fx

from dlinfer.errors import KVLayoutChangedError
from dlinfer.graph.ir.dialect import arguments, fake, overload
from dlinfer.ops.attention.kv_cache import kv_order
from dlinfer.vendor import discovery


def kv_layouts_of(graph: fx.Graph) -> dict[str, str]:
    """Device type -> order of the caches' dimensions, for the devices on which the graph has caches."""
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
    """Raises KVLayoutChangedError where caches are laid out otherwise by now."""
    for device, order in made_for.items():
        if discovery.kv_orders.get(device) != order and (given := kv_order(device)) != order:
            vendor = discovery.active(device)
            raise KVLayoutChangedError(
                made_for=order, given=given, vendor="none" if vendor is None else vendor.name, device=device
            )
