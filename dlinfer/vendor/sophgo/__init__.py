"""Sophgo: the sail API and BMRuntime on a Sophgo chip or on the chip emulator, and the graph engine ``sophgo``.

``from dlinfer.vendor.sophgo import sail``. Nothing of an SDK is loaded into this process: BMRuntime runs in a worker.
"""

from typing import Any

from dlinfer.toolchain import Toolchain
from dlinfer.vendor.base import Probe, Vendor


def _probe() -> Probe:
    from dlinfer.vendor.sophgo.runtime import chips

    found = chips.find()
    return Probe(bool(found.chips), found.reason, found.advice)


def _engine(name: str) -> Any:
    from dlinfer.vendor.sophgo.engine.engine import SophgoEngine

    return SophgoEngine()


def _toolchain() -> Toolchain:
    from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN

    return TOOLCHAIN


VENDOR = Vendor(
    name="sophgo",
    device_type="cpu",
    summary="Sophgo chips, or their emulator; tensors and what stays outside a graph are the host's",
    probe=_probe,
    engines=("sophgo",),
    load_engine=_engine,
    toolchain=_toolchain,
    priority=-10,  # never a default: below the CPU's own kernels, above the reference
)
