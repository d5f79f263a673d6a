"""The megengine vendor: all of MegEngine Lite's Python API on MegEngine Lite's C library, and the engine ``megengine``.

Import the API by ``from dlinfer.vendor.megengine import lite``. The C library runs in this process. Models are built in
the Python environment of the toolchain."""

from typing import Any

from dlinfer.toolchain import Toolchain
from dlinfer.vendor.base import Probe, Vendor


def _toolchain() -> Toolchain:
    from dlinfer.vendor.megengine.toolchain import TOOLCHAIN

    return TOOLCHAIN


def _probe() -> Probe:
    from dlinfer.toolchain import state

    installation = state(_toolchain())
    if not installation.installed:
        reason = f"its toolchain cannot be used: {installation.reason}"
        return Probe(False, reason, "dlinfer toolchain install megengine")
    return Probe(True, f"MegEngine Lite of the toolchain ({installation.reason})")


def _engine(name: str) -> Any:
    from dlinfer.vendor.megengine.engine import MegEngineEngine

    return MegEngineEngine()


VENDOR = Vendor(
    name="megengine",
    device_type="cpu",
    summary="graphs in MegEngine Lite on this CPU",
    probe=_probe,
    engines=("megengine",),
    load_engine=_engine,
    toolchain=_toolchain,
    priority=-10,  # used only when named
)
