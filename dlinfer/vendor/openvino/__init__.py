"""The OpenVINO vendor: Intel's runtime runs regions of a graph as models. Eager ops run on the cpu vendor's kernels."""

import os
from collections.abc import Mapping
from importlib import metadata, util
from typing import Any

from dlinfer.vendor.base import Kernel, Probe, Vendor
from dlinfer.vendor.openvino.layout import LAYOUT

OLDEST = (2026, 1)
_ADVICE = 'pip install "dlinfer[openvino]"'
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""oneDNN's variables that forbid newer CPU instructions. OpenVINO obeys them too; the first one that is set counts."""
_BELOW_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")


def _probe() -> Probe:
    """Return whether OpenVINO is usable, with a reason if it is not.

    The package is not imported: that takes 0.3 seconds.
    """
    if util.find_spec("openvino") is None:
        return Probe(False, "the package openvino is not installed", _ADVICE)
    version = metadata.version("openvino")
    if tuple(int(part) for part in version.split("-")[0].split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Probe(False, f"openvino {version} is older than {oldest}", _ADVICE)
    limit = next((name for name in _LIMITS if os.environ.get(name)), None)
    if limit is not None and _ends_the_process(os.environ[limit]):
        reason = f"with {limit}={os.environ[limit]}, OpenVINO ends the process on a CPU with AVX-512"
        return Probe(False, reason, f"unset {limit}, or set it to AVX512_CORE")
    return Probe(True, f"openvino {version}")


def _ends_the_process(limit: str) -> bool:
    """Return whether OpenVINO crashes on this CPU if a variable of ``_LIMITS`` has the value ``limit``, such as AVX2.

    On a CPU with AVX-512, OpenVINO calls AVX-512 kernels in spite of a lower limit, and crashes.
    """
    from dlinfer.graph.cache.fingerprint import cpu_flags

    return limit.upper() in _BELOW_AVX512 and "avx512f" in cpu_flags().split()


def _kernels() -> Mapping[str, Kernel]:
    import dlinfer.ops  # noqa: F401 - first: its import asks for these kernels, and some of them import it
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
    priority=5,  # below cpu's: used only when named
)
