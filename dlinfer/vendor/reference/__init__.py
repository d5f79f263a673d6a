"""The reference as a vendor: the ops' own bodies in plain torch, which run on any device and need no other package.

It is slow and simple on purpose. Other vendors' results are compared with the reference's.
"""

from collections.abc import Mapping

from dlinfer.vendor.base import Kernel, Probe, Vendor


def _kernels() -> Mapping[str, Kernel]:
    from dlinfer.ops.core.spec import registry

    return {name: spec.reference for name, spec in registry().items()}


VENDOR = Vendor(
    name="reference",
    device_type="any",
    summary="every op in plain torch, on any device; the oracle",
    probe=lambda: Probe(True, "plain torch, needs nothing"),
    load_kernels=_kernels,
    priority=-100,
    is_reference=True,
)
