"""Finding chips, the folder of an emulator, the header of a bmodel, the way to a chip in the machine."""

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dlinfer import settings
from dlinfer.vendor import discovery
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import (
    SophgoModelError,
    SophgoRuntimeError,
    SophgoUnavailableError,
)
from dlinfer.vendor.sophgo.runtime import bmodel as bmodel_file
from dlinfer.vendor.sophgo.runtime import chips, emulator
from dlinfer.vendor.sophgo.runtime.child import layout
from dlinfer.vendor.sophgo.runtime.worker import Worker
from tests.vendor.sophgo.bmodels import HIDDEN, WIDTH, oracle
from tests.vendor.sophgo.conftest import numbers, relative
from tests.vendor.sophgo.test_sail_engine import FLOAT16

# --- what there is


def machine(root: Path, nodes: int = 1, libraries: bool = True) -> Path:
    """A root folder of a machine with Sophgo devices."""
    (root / "dev").mkdir()
    for number in range(nodes):
        (root / f"dev/bm-sophon{number}").touch()
    if libraries:
        place = root / "opt/sophon/libsophon-current/lib"
        place.mkdir(parents=True)
        (place / "libbmrt.so.1.0").touch()
    return root


def test_a_chip_in_the_machine_comes_first(tmp_path):
    found = chips.find(machine(tmp_path, nodes=2))
    assert found.libsophon == tmp_path / "opt/sophon/libsophon-current/lib"
    assert found.chips == ("bm-sophon0", "bm-sophon1")


def test_devices_without_libsophon(tmp_path, toolchain):
    found = chips.find(machine(tmp_path, libraries=False))
    assert found.libsophon is None
    assert found.chips == ("bm1684x", "bm1688")
    assert "1 Sophgo devices, but no libsophon" in found.reason


def test_libsophon_where_the_linker_looks(tmp_path, monkeypatch):
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "libbmrt.so").touch()
    root = tmp_path / "root"
    (root / "etc/ld.so.conf.d").mkdir(parents=True)
    assert chips.libsophon(root) is None
    (root / "etc/ld.so.conf.d/libbmrt.conf").write_text(f"# libsophon\n{place}\n")
    assert chips.libsophon(root) == place
    (root / "etc/ld.so.conf.d/libbmrt.conf").unlink()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{place}")
    assert chips.libsophon(root) == place


def test_the_vendor_says_what_there_is(toolchain):
    vendor = discovery.get("sophgo")
    assert "emulators of bm1684x, bm1688" in discovery.probe(vendor).reason
    assert vendor.priority < discovery.get("cpu").priority  # never a default
    assert discovery.kernels_of(vendor) == discovery.kernels_of(discovery.get("cpu"))


def test_the_vendor_without_a_toolchain(tmp_path):
    with settings.override(cache_dir=str(tmp_path)):
        probe = discovery.get("sophgo").probe()
    assert not probe.available
    assert "make toolchains" in probe.next_step


def test_links_of_an_emulator_are_mended(toolchain, tmp_path, monkeypatch):
    monkeypatch.setattr(emulator, "cache_folder", lambda: tmp_path)
    place = emulator.folder("bm1688")
    wrong = place / "libcmodel.so"
    right = wrong.readlink()
    wrong.unlink()
    wrong.symlink_to("/nowhere")
    (place / "libbmrt.so.1.0").unlink()
    emulator.folder("bm1688")
    assert wrong.readlink() == right
    assert all(path.exists() for path in place.iterdir())


def test_no_emulator_of_a_chip_that_the_toolchain_has_none_of(toolchain):
    with pytest.raises(SophgoUnavailableError, match=r"no libcmodel_bm9999\.so"):
        emulator.folder("bm9999")


@pytest.mark.full
def test_what_takes_a_compiler_without_one(fresh, bmodel, tmp_path, monkeypatch):
    monkeypatch.setattr(emulator, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(emulator, "SHIM", "libnone.so")
    for name, devices in (("two devices", [0, 1]), ("growing bm1684x", [0])):
        with pytest.raises(SophgoUnavailableError, match="no C compiler"):
            sail.EngineLLM(str(bmodel(name)), devices)
    assert sail.EngineLLM(str(bmodel("bm1684x")), [0]).get_graph_names()


# --- the binding


def test_structures_are_as_long_as_in_c():
    """On 64-bit Linux; bm_tensor_t's memory begins at byte 40, its store mode at 64."""
    sizes = {
        layout.DeviceMemory: 24,
        layout.Shape: 36,
        layout.Tensor: 72,
        layout.Stage: 32,
        layout.Network: 144,
    }
    assert {each: ctypes.sizeof(each) for each in sizes} == sizes
    assert (layout.Tensor.memory.offset, layout.Tensor.store_mode.offset) == (40, 64)


def test_the_worker_is_small():
    """It loads neither torch nor numpy nor dlinfer."""
    code = f"""
import sys
{WORKER_IMPORT}
print(sorted({{name.partition('.')[0] for name in sys.modules}} & {{'torch', 'numpy', 'dlinfer'}}))
"""
    folder = Path(layout.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


WORKER_IMPORT = "sys.path.append(sys.argv[1]); import child.serve"


def test_libraries_that_cannot_be_loaded(tmp_path):
    (tmp_path / "libbmlib.so.0").write_text("no library")
    with pytest.raises(SophgoRuntimeError, match=r"library.*libbmlib"):
        Worker("a stand-in", tmp_path, emulated=True)


@pytest.fixture
def in_the_machine(fresh, tmp_path, monkeypatch):
    """The emulator's libraries where libsophon's would be: the way to a chip, with another chip behind it."""
    folder = emulator.folder("bm1684x")
    for name in emulator._LINKS:  # another process may be making a shim beside them
        shutil.copy(folder / name, tmp_path / name, follow_symlinks=True)
    place = chips.Found(tmp_path, ("bm-sophon0",), "a stand-in")
    monkeypatch.setattr(chips, "find", lambda: place)


def test_the_way_to_a_chip_in_the_machine(in_the_machine, bmodel):
    engine = sail.EngineLLM(str(bmodel("bm1684x")), [0])
    assert engine._model.devices[0].worker.name == "libsophon"
    inputs, outputs = engine.get_input_tensors("mlp"), engine.get_output_tensors("mlp")
    values = numbers(8)
    for index, value in enumerate(values):
        inputs[index].update_data(value.astype(np.float16))
    assert engine.process("mlp", inputs, outputs) == 0, engine.last_error
    assert relative(outputs[0].asnumpy().view(np.float16), oracle("mlp", *values)) < FLOAT16
    assert sail.Handle(0).get_target() == "BM1684X"


def test_copies_on_a_chip_are_bmlibs(in_the_machine):
    source = sail.Tensor(sail.Handle(0), np.arange(8, dtype=np.float32), False, True)
    target = sail.Tensor(sail.Handle(0), [8], sail.BM_FLOAT32, False, True)
    target.zeros()
    target.sync_d2d(source, 2, 1, 4)
    assert (target.asnumpy() == [0, 2, 3, 4, 5, 0, 0, 0]).all()


def test_a_device_that_the_machine_has_not(in_the_machine):
    with pytest.raises(SophgoRuntimeError, match="has 1 devices, numbered from 0"):
        sail.Handle(1)


def test_a_bmodel_of_another_chip_than_the_machines(in_the_machine, bmodel):
    with pytest.raises(SophgoModelError, match="compiled for bm1688, but device 0 is bm1684x"):
        sail.EngineLLM(str(bmodel("bm1688")), [0])


# --- headers


def test_the_header_of_a_bmodel(bmodel):
    for name, chip, devices in (
        ("bm1684x", "BM1684X", 1),
        ("bm1688", "BM1688", 1),
        ("eight devices", "BM1684X", 8),
    ):
        path = bmodel(name)
        header = bmodel_file.read_file(path)
        assert (header.chip, header.devices) == (chip, devices)
        assert bmodel_file.read_bytes(path.read_bytes()) == header


def test_the_memory_of_a_bmodels_stages(bmodel):
    header = bmodel_file.read_file(bmodel("growing bm1684x"))
    (first,), (second,) = header.memory["mlp"]
    assert 0 < first < second
    assert header.memory["head"] == ((0,),)
    assert header.working() == {first, second}
    assert min(header.weights - {0}) >= 2 * 2 * WIDTH * HIDDEN  # two float16 matrices


@hypothesis_settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_a_header_or_a_clear_error(data, begun):
    """Whatever stands in the flatbuffer, reading it ends."""
    if begun:
        data = struct.pack("<4I", 0xFF55AAEE, 64, len(data), 0) + bytes(48) + data
    try:
        bmodel_file.read_bytes(data)
    except SophgoModelError as error:
        assert "in memory" in str(error)
