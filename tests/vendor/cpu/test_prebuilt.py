"""The libraries that a wheel carries: which one is taken, and what happens where none fits."""

from pathlib import Path

import pytest
import torch

from dlinfer import settings
from dlinfer.errors import SettingError
from dlinfer.vendor.cpu import isa, native, prebuilt
from tests.vendor.cpu.test_native import needs_compiler

LEVELS = [level for level in prebuilt.LEVELS if not isa.missing(level)]


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a wheel with libraries of every level, made from a source that compiles at once."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "empty.cpp").write_text("int dlinfer_answer() { return 42; }\n")
    monkeypatch.setattr(native, "SOURCES", sources)
    folder = tmp_path / "kernels"
    folder.mkdir()
    native.make_prebuilt(folder)
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    return folder


@needs_compiler
class TestWheel:
    def test_has_a_library_of_each_level(self, wheel):
        assert len(list(wheel.glob("*.so"))) == len(prebuilt.LEVELS)

    @pytest.mark.skipif(not LEVELS, reason="this CPU has no AVX2")
    def test_the_best_level_is_taken_and_nothing_compiled(self, wheel, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "/nonexistent")
        with settings.override(cpu_isa=""):
            path = native.build(tmp_path / "cache")
            assert path.parent == wheel
            assert f"-{LEVELS[-1]}-" in path.name
            assert native.library_name() == path.name
        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_chosen_level_is_taken(self, wheel, tmp_path, level):
        with settings.override(cpu_isa=level):
            assert f"-{level}-" in native.build(tmp_path).name

    def test_a_level_that_this_cpu_lacks_is_an_error(self, wheel, tmp_path):
        lacking = next((level for level in isa.NEEDS if isa.missing(level)), None)
        if lacking is None:
            pytest.skip("this CPU has every level")
        with settings.override(cpu_isa=lacking), pytest.raises(SettingError, match="DLINFER_CPU_ISA"):
            native.build(tmp_path)

    def test_another_torch_compiles_its_own(self, wheel, tmp_path, monkeypatch):
        monkeypatch.setattr(torch, "__version__", "2.99.0")
        assert native.build(tmp_path).parent == tmp_path

    def test_other_sources_compile_their_own(self, wheel, tmp_path):
        (native.SOURCES / "empty.cpp").write_text("int dlinfer_answer() { return 43; }\n")
        assert native.build(tmp_path).parent == tmp_path

    def test_a_damaged_library_is_passed_over(self, wheel, tmp_path):
        for path in wheel.glob("*.so"):
            path.write_bytes(path.read_bytes()[:-1])
        assert native.build(tmp_path).parent == tmp_path
