"""DLINFER_CPU_ISA: the C++ kernels keep below a level, and a level that the CPU lacks is refused before it crashes."""

import pytest

from dlinfer import settings
from dlinfer.errors import SettingError
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.vendor.cpu import isa, native, prebuilt
from tests.vendor.cpu.test_native import needs_compiler

AVAILABLE = [level for level in isa.NEEDS if not isa.missing(level)]


def test_levels_are_those_of_the_setting():
    assert tuple(isa.NEEDS) == settings.CPU_ISAS


def test_nothing_is_said_to_the_compiler_by_default():
    with settings.override(cpu_isa=""):
        assert isa.flags() == ()


@needs_compiler
def test_each_level_is_a_library_of_its_own():
    names = set()
    for level in ("", *AVAILABLE):
        with settings.override(cpu_isa=level):
            names.add(native.library_name())
    assert len(names) == len(AVAILABLE) + 1


@pytest.mark.parametrize("level", isa.NEEDS)
def test_a_level_above_the_cpu_is_refused_by_name(monkeypatch, tmp_path, level):
    monkeypatch.setattr(isa, "cpu_flags", lambda: "fpu sse")
    with settings.override(cpu_isa=level), pytest.raises(SettingError, match="DLINFER_CPU_ISA") as refused:
        native.build(tmp_path)
    assert f"it lacks {isa.NEEDS[level][0]}" in str(refused.value)


def test_models_are_neither_proposed_nor_in_a_wheel(monkeypatch):
    monkeypatch.setattr(isa, "cpu_flags", lambda: "sse4_2 popcnt avx2 fma f16c bmi2")
    with settings.override(cpu_isa="amx_model"):
        assert isa.flags()
    with settings.override(cpu_isa="amx"), pytest.raises(SettingError, match=r"\(sse42, avx2\)"):
        isa.flags()
    assert not any(map(isa.is_model, prebuilt.LEVELS))


@needs_compiler
@pytest.mark.parametrize("level", AVAILABLE)
def test_the_compiler_keeps_below_the_level(level):
    with settings.override(cpu_isa=level):
        macros = native._run([*native._command(), "-dM", "-E", "-x", "c++", "/dev/null"])
    assert ("__AVX2__" in macros) == (level not in ("sse42", "neon", "neon_dotprod"))
    assert ("__ARM_FEATURE_DOTPROD" in macros) == (level == "neon_dotprod")
    assert ("__AVX512F__" in macros) == level.startswith(("avx512", "amx"))


def test_the_level_is_part_of_every_key():
    before = environment()
    with settings.override(cpu_isa="sse42" if settings.current().cpu_isa == "avx2" else "avx2"):
        assert environment() != before
