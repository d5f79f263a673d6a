"""A plugin of pytest that makes OpenVINO take this CPU for one with AVX-512 FP16, in this process.

OpenVINO asks a record that it fills once by CPUID; the bit of AVX-512 FP16 is set there. ``instructions.cpp`` computes
the instructions that its kernels then run and the CPU lacks. So OpenVINO decides, converts, and rounds as on a CPU with
them. The CPU must have AVX-512 BF16 and AVX-VNNI, which OpenVINO asks for besides.
"""

import atexit
import ctypes
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from dlinfer.graph.selftest import suite
from dlinfer.vendor.cpu import native
from dlinfer.vendor.openvino.devices import core, has_float16

_FLOAT16, _AVX2 = 1 << 11, 1 << 20  # Xbyak's numbers of tAVX512_FP16 and tAVX2
_FEATURES = 112  # bytes from the features to the model's number


class NoModelError(RuntimeError):
    """OpenVINO does not take this CPU for one with float16."""


def pretend() -> None:
    """Make OpenVINO compute in float16 on a CPU that does not. Raises NoModelError where it cannot."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    suite.cache_folder = lambda: Path(folder)  # nothing of what such a CPU answers is true of this one
    core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")  # loads the plugin, which fills the record
    for features in [ctypes.c_uint64.from_address(address - _FEATURES) for address in _records()]:
        if features.value & _AVX2:
            features.value |= _FLOAT16
    if not has_float16():
        raise NoModelError("OpenVINO does not take this CPU for one with AVX-512 FP16")
    library, source = Path(folder, "instructions.so"), Path(__file__).with_name("instructions.cpp")
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC"]
    subprocess.run([*native.compiler(), *flags, str(source), "-o", str(library)], check=True)
    ctypes.CDLL(str(library)).model_instructions()


def _records() -> list[int]:
    """Where OpenVINO's libraries keep the CPU's model, family and stepping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found: list[int] = []
    for line, before in zip(lines, ["", *lines], strict=False):
        span, rights, *rest = line.split()
        behind = len(rest) < 4 and "libopenvino" in before  # data that begins as zeros has no name
        if not rights.startswith("rw") or not ("libopenvino" in line or behind):
            continue
        start, end = (int(one, 16) for one in span.split("-"))
        places = re.finditer(re.escape(_identity()), ctypes.string_at(start, end - start))
        found += [start + place.start() for place in places if place.start() >= _FEATURES]
    return found


def _identity() -> bytes:
    """Model, family, stepping, and what extends them, as Xbyak lays them out."""
    said = dict(
        re.findall(
            r"^(cpu family|model|stepping)\s*:\s*(\d+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    )
    family, model, stepping = (int(said[one]) for one in ("cpu family", "model", "stepping"))
    beyond = max(0, family - 15)
    return struct.pack("<7I", model & 15, family - beyond, stepping, model >> 4, beyond, family, model)


def pytest_configure() -> None:
    """Called before the first test is imported."""
    pretend()
