"""The levels of CPU instructions that the C++ kernels can be compiled for. DLINFER_CPU_ISA chooses one.

A level whose name ends in "_model" is for tests, and used only on request. On any CPU with AVX2 it runs the kernels of
a higher level: a header (csrc/model) computes that level's instructions in software."""

from pathlib import Path

from dlinfer import settings
from dlinfer.errors import SettingError
from dlinfer.graph.cache.fingerprint import cpu_flags

_MODELS = Path(__file__).with_name("csrc") / "model"
_MODEL = "_model"
_MARCH = {
    "sse42": "x86-64-v2",
    "avx2": "x86-64-v3",
    "avx512": "x86-64-v4",
    "avx512_bf16": "x86-64-v4",
    "avx512_fp16": "x86-64-v4",
    "amx": "x86-64-v4",
    "neon": "armv8-a",
    "neon_dotprod": "armv8.2-a+dotprod",
}
_MORE = {
    "avx512_bf16": ("-mavx512bf16", "-mavx512vnni"),
    "avx512_fp16": ("-mavx512bf16", "-mavx512vnni", "-mavx512fp16"),
    "amx": ("-mavx512bf16", "-mavx512vnni", "-mavx512fp16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
_AVX2 = ("avx2", "fma", "f16c", "bmi2")
NEEDS: dict[str, tuple[str, ...]] = {
    "sse42": ("sse4_2", "popcnt"),
    "avx2": _AVX2,
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "avx512_bf16": ("avx512f", "avx512vl", "avx512_bf16", "avx512_vnni"),
    "avx512_fp16": ("avx512f", "avx512vl", "avx512_bf16", "avx512_vnni", "avx512_fp16"),
    "amx": ("avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    "neon": ("asimd",),
    "neon_dotprod": ("asimd", "asimddp"),
    "avx512_model": _AVX2,
    "avx512_bf16_model": _AVX2,
    "amx_model": _AVX2,
}
"""Level -> the CPU flags that it needs, with Linux's names."""


def missing(level: str) -> list[str]:
    """Return the flags that a level needs and this CPU lacks."""
    here = cpu_flags().split()
    return [flag for flag in NEEDS[level] if flag not in here]


def is_model(level: str) -> bool:
    """Return whether a level is one for tests, whose instructions are computed in software."""
    return level.endswith(_MODEL)


def modelled(level: str) -> str:
    """Return the level that a level for tests imitates. Other levels are returned unchanged."""
    return level.removesuffix(_MODEL)


def flags() -> tuple[str, ...]:
    """Return the compiler flags of the level in DLINFER_CPU_ISA; none if it is not set.

    Raises SettingError if this CPU lacks the level's instructions: the kernels would end the process."""
    chosen = settings.current().cpu_isa
    if not chosen:
        return ()
    if lacking := missing(chosen):
        here = [level for level in NEEDS if not missing(level) and not is_model(level)]
        expected = f"a level that this CPU has ({', '.join(here) or 'none'}); it lacks {', '.join(lacking)}"
        raise SettingError(variable="DLINFER_CPU_ISA", given=chosen, expected=expected)
    return flags_of(chosen)


def flags_of(level: str) -> tuple[str, ...]:
    """Return the compiler flags of a level, whatever this CPU has."""
    if is_model(level):
        # Optimise little: with -O3 the compiler takes twice as long over instructions in software.
        return (
            f"-march={_MARCH['avx2']}",
            "-O1",
            "-Wno-psabi",
            "-include",
            str(_MODELS / f"{modelled(level)}.h"),
        )
    return (f"-march={_MARCH[level]}", *_MORE.get(level, ()))
