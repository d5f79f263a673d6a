"""OpenVINO as a graph engine: whole regions in Intel's runtime. Its eager kernels are those of the cpu vendor."""

from collections.abc import Mapping
from importlib import metadata, util
from typing import Any

from dlinfer.vendor.base import Kernel, Probe, Vendor
from dlinfer.vendor.openvino.layout import LAYOUT

OLDEST = (2026, 1)
_ADVICE = 'pip install "dlinfer[openvino]"'


def _probe() -> Probe:
    """Whether the package is there; it is not imported, which takes a third of a second."""
    if util.find_spec("openvino") is None:
        return Probe(False, "the package openvino is not installed", _ADVICE)
    version = metadata.version("openvino")
    if tuple(int(part) for part in version.split("-")[0].split(".")[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return Probe(False, f"openvino {version} is older than {wanted}", _ADVICE)
    return Probe(True, f"openvino {version}")


def _kernels() -> Mapping[str, Kernel]:
    import dlinfer.ops  # noqa: F401 - first: while it is imported it asks for these kernels, of which some import it
    from dlinfer.vendor.openvino.kernels import kernels

    return kernels()


def _engine(name: str) -> Any:
    from dlinfer.vendor.openvino.engine import OpenVINOEngine

    return OpenVINOEngine()


VENDOR = Vendor(
    name="openvino",
    device_type="cpu",
    summary="graphs in OpenVINO's runtime on a CPU, or on an Intel GPU or NPU that it finds",
    probe=_probe,
    load_kernels=_kernels,
    kv_cache_layout=LAYOUT,
    engines=("openvino",),
    default_engine="openvino",
    load_engine=_engine,
    priority=5,  # below cpu's: it is used where it is asked for
)
