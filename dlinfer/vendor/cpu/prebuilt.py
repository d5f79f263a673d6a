"""The C++ kernels in a wheel, compiled for a few levels of instructions.

hatch_build.py builds them with the wheel, for one version of torch. With another torch the kernels are compiled on the
user's machine, as in an install from source.
"""

import hashlib
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dlinfer import settings
from dlinfer.vendor.cpu import isa

FOLDER = Path(__file__).with_name("prebuilt_kernels")
_LEVELS = {
    "x86_64": ("avx2", "avx512", "avx512_bf16", "amx"),
    "aarch64": ("neon", "neon_dotprod"),
}
LEVELS = _LEVELS.get(platform.machine(), ())
"""The levels in a wheel for this architecture, from the fewest instructions to the most."""


def library(sources: bytes) -> Path | None:
    """Return the wheel's library of the level in DLINFER_CPU_ISA or, if that is not set, the highest that this CPU has.

    None if the wheel has no library of this level for this torch. sources: digest of the C++ sources that the library
    must be built from. Raises SettingError if this CPU lacks the level in DLINFER_CPU_ISA."""
    isa.flags()  # raises for a level that this CPU lacks
    chosen = settings.current().cpu_isa
    here = [level for level in LEVELS if not isa.missing(level)]
    level = chosen or (here[-1] if here else "")
    path = FOLDER / name(level, sources)
    return path if path.is_file() else None


def name(level: str, sources: bytes) -> str:
    series = ".".join(torch.__version__.split(".")[:2])
    digest = hashlib.sha256("\0".join([series, level, *isa.flags_of(level)]).encode() + sources)
    return f"dlinfer_cpu-{level}-{digest.hexdigest()[:16]}.so"


def make(folder: Path, sources: bytes, compiled: Callable[[tuple[str, ...], Path], None]) -> list[Path]:
    """Compile every level into a folder. Return the files.

    sources: digest of the C++ sources, for the files' names.
    compiled: function that compiles with some flags into a file.
    """
    paths = [folder / name(level, sources) for level in LEVELS]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compiled, map(isa.flags_of, LEVELS), paths))
    return paths
