"""The sophgo vendor: the graph engine ``sophgo``, and sophon-sail's API, on a Sophgo chip or an emulator of it.

Import the API by ``from dlinfer.vendor.sophgo import sail``. Models are files called bmodels, which contain one or more
compiled networks (nets). BMRuntime, the SDK's C library, runs them. It is loaded only in a worker process, never in
this process."""

from typing import Any

from dlinfer.toolchain import Toolchain
from dlinfer.vendor.base import Probe, Vendor


def _probe() -> Probe:
    from dlinfer.vendor.sophgo.runtime import chips

    available = chips.find()
    return Probe(bool(available.chips), available.reason, available.advice)


def _engine(name: str) -> Any:
    from dlinfer.vendor.sophgo.engine.engine import SophgoEngine

    return SophgoEngine()


def _toolchain() -> Toolchain:
    from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN

    return TOOLCHAIN


VENDOR = Vendor(
    name="sophgo",
    device_type="cpu",
    summary="Sophgo chips, or their emulator; tensors and ops outside graphs stay on the host",
    probe=_probe,
    engines=("sophgo",),
    load_engine=_engine,
    toolchain=_toolchain,
    priority=-10,  # never a default: below the CPU's own kernels, above the reference
)
