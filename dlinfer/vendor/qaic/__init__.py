"""Qualcomm Cloud AI: the Session API of Qualcomm's SDK, and the graph engine ``qaic``.

Import the API by ``from dlinfer.vendor.qaic import Session``. Without the SDK, a Session can run an .onnx file on ONNX
Runtime.
"""

from typing import Any

from dlinfer.vendor.base import Probe, Vendor


def __getattr__(name: str) -> Any:
    if name == "Session":
        from dlinfer.vendor.qaic.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _probe() -> Probe:
    import importlib.util

    from dlinfer.vendor.qaic import sdk

    lacking = sdk.missing(compiling=True)
    if not lacking:
        return Probe(True, "Qualcomm Cloud AI SDK")
    reason = "no Qualcomm Cloud AI SDK: " + "; ".join(lacking)
    if importlib.util.find_spec("onnxruntime") is None:
        return Probe(
            False,
            f"{reason}; and onnxruntime, which could replace it, is not installed",
            "pip install 'dlinfer[qaic]'",
        )
    # Available without the SDK: its Session and its engine can run on ONNX Runtime.
    return Probe(True, f"{reason}; only backend 'onnxruntime' can run", sdk.ADVICE)


def _engine(name: str) -> Any:
    from dlinfer.vendor.qaic.engine.engine import QaicEngine

    return QaicEngine()


VENDOR = Vendor(
    name="qaic",
    device_type="cpu",
    summary="Qualcomm Cloud AI cards; tensors and ops outside graphs stay on the host",
    probe=_probe,
    engines=("qaic",),
    load_engine=_engine,
    priority=-10,  # never a default: below the CPU's own kernels, above the reference
)
