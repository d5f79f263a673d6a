"""The configuration of AMX tiles as the compiler writes it, where the instruction would read it: without any tiles."""

import ctypes
import re
import struct
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from dlinfer.vendor.cpu import isa, native
from tests.vendor.cpu.test_native import needs_compiler

SOURCE = """
#include "attention/tiled_panel.h"
extern "C" void configure(int64_t words) {
  const dlinfer::TileRegisters registers(dlinfer::prefill::shapes_for(words));
}
"""
CAPTURE = """
#include <cstring>
extern "C" unsigned char captured[64];
unsigned char captured[64];
extern "C" void capture(const void* from) { std::memcpy(captured, from, 64); }
"""


def built(folder: Path) -> ctypes.CDLL:
    """``configure``, whose LDTILECFG is a call of ``capture``."""
    (folder / "configure.cpp").write_text(SOURCE)
    (folder / "capture.cpp").write_text(CAPTURE)
    assembly, library = folder / "configure.s", folder / "library.so"
    flags = [*isa.flags_of("amx"), f"-I{native.SOURCES}", *(f"-I{path}" for path in include_paths())]
    command = [*native.compiler(), "-std=c++20", "-O3", "-fPIC"]
    # A call would write into the red zone, where the configuration may lie.
    subprocess.run(
        [*command, *flags, "-mno-red-zone", "-S", str(folder / "configure.cpp"), "-o", str(assembly)],
        check=True,
    )
    text = re.sub(r"\ttilerelease\n", "\n", assembly.read_text())
    text, calls = re.subn(r"\tldtilecfg\s+(\S+)\n", r"\tleaq\t\1, %rdi\n\tcall\tcapture@PLT\n", text)
    assert calls == 1
    assembly.write_text(text)
    subprocess.run(
        [*command, "-shared", str(assembly), str(folder / "capture.cpp"), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


@needs_compiler
@pytest.mark.skipif(bool(isa.missing("avx512")), reason="this CPU does not run what is compiled for AMX")
def test_all_of_a_configuration_is_in_memory(tmp_path: Path) -> None:
    """GCC takes LDTILECFG to read 8 bytes, and leaves out what nothing else reads."""
    library = built(tmp_path)
    captured = (ctypes.c_ubyte * 64).in_dll(library, "captured")
    for words in (1, 15, 16, 32, 40, 48):
        library.configure(ctypes.c_int64(words))
        rest = words % 16
        widths = [64] * 6 + [4 * rest, 64 if rest else 0]
        rows = [16] * 6 + [16 if rest else 0, rest]
        assert bytes(captured) == struct.pack("<BB14x8H16x8B8x", 1, 0, *widths, *rows)
