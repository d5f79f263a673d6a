"""What a compiled artifact depends on besides its graph: versions, dlinfer's code, the CPU, threads."""

import functools
import hashlib
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


def _sources() -> str:
    """A hash of what turns graphs into artifacts, so that a changed pass never meets an old artifact."""
    import dlinfer

    root = Path(dlinfer.__file__).parent
    digest = hashlib.sha256(dlinfer.__version__.encode())
    for folder in ("framework", "graph", "ops", "vendor"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
