"""Which instructions the C++ kernels are compiled for, where DLINFER_CPU_ISA keeps them below what the CPU has."""

import functools

from dlinfer import settings
from dlinfer.errors import SettingError
from dlinfer.graph.cache.fingerprint import cpu_flags

_MARCH = {
    "sse42": "x86-64-v2",
    "avx2": "x86-64-v3",
    "avx512": "x86-64-v4",
    "avx512_bf16": "x86-64-v4",
    "avx512_fp16": "x86-64-v4",
    "amx": "x86-64-v4",
}
_MORE = {
    "avx512_bf16": ("-mavx512bf16", "-mavx512vnni"),
    "avx512_fp16": ("-mavx512bf16", "-mavx512vnni", "-mavx512fp16"),
    "amx": ("-mavx512bf16", "-mavx512vnni", "-mavx512fp16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
NEEDS: dict[str, tuple[str, ...]] = {
    "sse42": ("sse4_2", "popcnt"),
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "avx512_bf16": ("avx512f", "avx512vl", "avx512_bf16", "avx512_vnni"),
    "avx512_fp16": ("avx512f", "avx512vl", "avx512_bf16", "avx512_vnni", "avx512_fp16"),
    "amx": ("avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
}
"""Flags, as Linux lists them, of the CPU that runs each level."""


def missing(level: str) -> list[str]:
    """Flags that a level needs and this CPU has not."""
    here = cpu_flags().split()
    return [flag for flag in NEEDS[level] if flag not in here]


def flags() -> tuple[str, ...]:
    """Compiler flags of the chosen level; none where nothing is chosen.

    Raises SettingError where this CPU cannot run it: the kernels would end the process.
    """
    chosen = settings.current().cpu_isa
    if not chosen:
        return ()
    if lacking := missing(chosen):
        here = [level for level in NEEDS if not missing(level)]
        expected = f"a level that this CPU has ({', '.join(here) or 'none'}); it lacks {', '.join(lacking)}"
        raise SettingError(variable="DLINFER_CPU_ISA", given=chosen, expected=expected)
    return flags_of(chosen)


def flags_of(level: str) -> tuple[str, ...]:
    """Compiler flags of a level, whatever this CPU has."""
    return (f"-march={_MARCH[level]}", *_MORE.get(level, ()))


def has_tiles() -> bool:
    """Whether this CPU has the matrix instructions of AMX, and DLINFER_CPU_ISA does not rule them out."""
    return settings.current().cpu_isa in ("", "amx") and _has_tiles()


@functools.cache
def _has_tiles() -> bool:
    return not missing("amx")
