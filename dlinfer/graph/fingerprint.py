"""What a compiled artifact depends on besides its graph: versions, dlinfer's code, the CPU, threads."""

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path

import torch


def environment() -> str:
    """Text that differs wherever a compiled artifact of here would not be right or not be fast."""
    return f"{_machine()}\nthreads {torch.get_num_threads()}"


@functools.cache
def _machine() -> str:
    parts = [
        f"python {sys.version_info[:3]}",
        f"torch {torch.__version__} {torch.version.git_version}",
        f"dlinfer {_sources()}",
        f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {cpu_flags()}",
    ]
    return "\n".join(parts)


@functools.cache
def cpu_flags() -> str:
    """The instruction-set extensions of this CPU, as the kernel lists them; its name elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()


FORCES_ISA = (
    "ATEN_CPU_CAPABILITY",
    "DLINFER_CPU_ISA",
    "DNNL_CPU_ISA_HINTS",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)
"""Variables by which people keep libraries from instructions that the CPU has, or let them round more."""


def forced_isa() -> str:
    """The CPU's model, and what the environment says of its instructions: results may differ wherever this does."""
    forced = [f"{name}={os.environ[name]}" for name in FORCES_ISA if os.environ.get(name)]
    return "\n".join([f"model {cpu_model()}", *forced])


@functools.cache
def cpu_model() -> str:
    """What Linux calls this CPU, with the numbers that tell two of one name apart; its name elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")
    pairs = (line.partition(":") for line in first.splitlines())
    return ", ".join(f"{name.strip()} {value.strip()}" for name, _, value in pairs if name.strip() in wanted)


def _sources() -> str:
    """A hash of what turns graphs into artifacts, so that a changed pass never meets an old artifact."""
    import dlinfer

    root = Path(dlinfer.__file__).parent
    digest = hashlib.sha256(dlinfer.__version__.encode())
    for folder in ("framework", "graph", "ops", "vendor"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
