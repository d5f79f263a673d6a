"""ONNX Runtime as a graph engine, with all execution providers of the installed package."""

from importlib import util
from typing import Any

from dlinfer.vendor.base import Probe, Vendor

_NAME = "onnxruntime"
_NEEDED = ("onnxruntime", "onnx", "onnxscript", "onnx_ir")


def _probe() -> Probe:
    """Report whether the packages that the engine needs are installed, without importing any of them."""
    missing = [name for name in _NEEDED if util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        reason = f"{', '.join(missing)} {verb} not installed"
        return Probe(False, reason, 'pip install "dlinfer[onnxruntime]"')
    return Probe(True, "onnxruntime with the exporter's packages")


def _engine(name: str) -> Any:
    from dlinfer.vendor.onnxruntime.engine import OnnxRuntimeEngine

    return OnnxRuntimeEngine()


VENDOR = Vendor(
    name=_NAME,
    device_type="cpu",
    summary="graphs in ONNX Runtime, on the execution providers that are installed",
    probe=_probe,
    engines=(_NAME,),
    default_engine=_NAME,
    load_engine=_engine,
    priority=-10,  # used only when named
)
