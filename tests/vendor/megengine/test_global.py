"""LiteGlobal and set_log_level, on the real library."""

import ctypes
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlinfer.toolchain import find
from dlinfer.vendor.megengine.errors import (
    LiteArgumentError,
    LiteCallbackError,
    LiteError,
    LiteLackError,
    LiteModelError,
)
from dlinfer.vendor.megengine.lite import (
    LiteConfig,
    LiteDeviceType,
    LiteGlobal,
    LiteLogLevel,
    LiteNetwork,
    decryption_func,
    get_log_level,
    set_log_level,
)
from dlinfer.vendor.megengine.lite.binding.library import library
from dlinfer.vendor.megengine.toolchain import TOOLCHAIN
from tests.vendor.megengine import models, sealed_models
from tests.vendor.megengine.running import check, loaded

AES_KEY = bytes(range(32))
RC4_KEY = bytes(range(100, 116))


def encrypted(method: str) -> LiteConfig:
    config = LiteConfig()
    config.bare_model_cryption_name = method.encode()
    return config


def test_a_decryption_of_ones_own(layer, rng, tmp_path):
    asked: list[bool] = []

    @decryption_func
    def exclusive_or(in_arr, key_arr, out_arr):
        asked.append(out_arr is None)
        if not out_arr:
            return in_arr.size
        out_arr[:] = in_arr ^ key_arr[0]
        return out_arr.size

    LiteGlobal.register_decryption_and_key("xor", exclusive_or, [15])
    path = tmp_path / "sealed.mge"
    path.write_bytes((np.frombuffer(layer.read_bytes(), "u1") ^ 15).tobytes())
    check(loaded(path, config=encrypted("xor")), rng)
    assert (asked[0], asked[-1]) == (True, False)  # the size first, then the bytes
    with pytest.raises(LiteModelError):
        loaded(layer, config=encrypted("xor"))
    with pytest.raises(LiteError, match="already registered"):
        LiteGlobal.register_decryption_and_key("xor", exclusive_or, [1])
    LiteGlobal.update_decryption_key("xor", [0])
    check(loaded(layer, config=encrypted("xor")), rng)
    with pytest.raises(LiteModelError, match="not registe"):
        loaded(layer, config=encrypted("nobody's"))
    for key in ([], [256], [-1], ["a"]):
        with pytest.raises(LiteArgumentError, match="key"):
            LiteGlobal.register_decryption_and_key("other", exclusive_or, key)  # pyright: ignore[reportArgumentType]
    with pytest.raises(LiteArgumentError, match="a function"):
        LiteGlobal.register_decryption_and_key("other", 5, [1])


def test_a_decryption_that_raises_fails_the_load_only(layer, rng):
    class Locked(Exception):
        pass

    def locked(in_arr, key_arr, out_arr):
        if key_arr[0] == 1:
            raise Locked("no key today")
        if out_arr is not None:
            out_arr[:] = in_arr
        return in_arr.size

    LiteGlobal.register_decryption_and_key("locked", locked, [1])
    with pytest.raises(LiteCallbackError, match="Locked: no key today") as raised:
        loaded(layer, config=encrypted("locked"))
    assert isinstance(raised.value.__cause__, Locked)
    LiteGlobal.update_decryption_key("locked", [2])
    check(loaded(layer, config=encrypted("locked")), rng)


def test_a_decryption_gets_the_memory_that_it_first_asked_for(layer, rng):
    """One that gives another size each time it is asked: the library asks once, and so do we."""
    given: list[int] = []

    def growing(in_arr, key_arr, out_arr):
        if out_arr is None:
            return in_arr.size + 64 * len(given)
        given.append(out_arr.size)
        out_arr[: in_arr.size] = in_arr
        return out_arr.size

    LiteGlobal.register_decryption_and_key("growing", growing, [1])
    size = layer.stat().st_size
    for _ in range(2):
        check(loaded(layer, config=encrypted("growing")), rng)
    assert given == [size, size + 64]


@pytest.mark.parametrize(
    ("method", "seal", "key"),
    [
        ("AES_default", sealed_models.aes, AES_KEY),
        ("RC4_default", sealed_models.rc4, RC4_KEY),
        ("SIMPLE_FAST_RC4_default", sealed_models.simple_fast_rc4, RC4_KEY),
    ],
)
def test_built_in_decryptions_and_their_keys(layer, rng, tmp_path, method, seal, key):
    pytest.importorskip("cryptography", reason="AES needs the package cryptography")
    path = tmp_path / "sealed.mge"
    path.write_bytes(seal(layer.read_bytes(), key))
    LiteGlobal.update_decryption_key(method, bytes(len(key)))
    with pytest.raises(RuntimeError):  # as documented
        loaded(path, config=encrypted(method))
    LiteGlobal.update_decryption_key(method, list(key))
    check(loaded(path, config=encrypted(method)), rng)
    for wrong in (key[:-1], key + b"x"):
        with pytest.raises(LiteArgumentError, match=f"{len(key)} bytes"):
            LiteGlobal.update_decryption_key(method, wrong)
    whole = path.read_bytes()
    for damaged in (whole[:7], whole[:-3], whole[:24], whole[:-8] + b"\xff" * 8, whole[8:]):
        with pytest.raises(LiteModelError):
            loaded_bytes(damaged, method)
    with pytest.raises(LiteError, match="not registered"):
        LiteGlobal.update_decryption_key("nobody's", [1])


def loaded_bytes(model: bytes, method: str) -> None:
    LiteNetwork(encrypted(method)).load(model)


LOADER = """
#include <stdio.h>
void mgb_c_opr_init(void* get_api) {
    FILE* file = fopen("%s", "w");
    fprintf(file, "%%d", get_api != 0);
    fclose(file);
}
"""


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="a loader is made here with a C compiler, and there is none"
)
def test_set_loader_lib_path(tmp_path):
    said, source, library = tmp_path / "said", tmp_path / "loader.c", tmp_path / "loader.so"
    source.write_text(LOADER % said)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    LiteGlobal.set_loader_lib_path(str(library))
    assert said.read_text() == "1"
    with pytest.raises(LiteArgumentError, match="a file"):
        LiteGlobal.set_loader_lib_path(tmp_path / "nowhere.so")
    with pytest.raises(LiteError, match="failed to open"):
        LiteGlobal.set_loader_lib_path(source)


ALGORITHMS = """
import sys
from dlinfer.vendor.megengine.lite import *
model, first, second = sys.argv[1:]
network = LiteNetwork()
network.set_network_algo_policy(LiteAlgoSelectStrategy.LITE_ALGO_PROFILE)
LiteGlobal.set_persistent_cache(first, always_sync=False)
network.load(model)
for name in network.get_all_input_name():
    network.get_io_tensor(name).fill_zero()
network.forward()
network.wait()
LiteGlobal.dump_persistent_cache(second)
"""


@pytest.mark.full
def test_set_and_dump_persistent_cache(tmp_path):
    """In processes of their own: one that has run a convolution keeps its algorithm, whatever cache is set."""
    model, caches = tmp_path / "convolution.mge", [tmp_path / name for name in ("none", "found", "again")]
    model.write_bytes(models.convolution())
    for first, second in itertools.pairwise(caches):
        command = [sys.executable, "-c", ALGORITHMS, model, first, second]
        subprocess.run(command, check=True, capture_output=True, timeout=250)
    assert caches[1].stat().st_size > 500  # the profiled convolution is in it
    assert caches[2].read_bytes() == caches[1].read_bytes()  # nothing was left to profile
    for call in (LiteGlobal.set_persistent_cache, LiteGlobal.dump_persistent_cache):
        with pytest.raises(LiteArgumentError, match="in an existing folder"):
            call(tmp_path / "nowhere" / "cache")


def test_get_device_count():
    assert LiteGlobal.get_device_count(LiteDeviceType.LITE_CPU) >= 1
    assert LiteGlobal.get_device_count(LiteDeviceType.LITE_CUDA) >= 0
    with pytest.raises(LiteError, match="unsupported"):
        LiteGlobal.get_device_count(LiteDeviceType.LITE_NPU)
    with pytest.raises(LiteArgumentError, match="device_type"):
        LiteGlobal.get_device_count(17)


def test_try_coalesce_all_free_memory(layer, rng, monkeypatch):
    """Memory of CPUs is in no pool, so that nothing comes of it there: it reaches the library, which goes on."""
    network, calls = loaded(layer), []
    real = library()._library.LITE_try_coalesce_all_free_memory
    monkeypatch.setattr(
        library()._library, "LITE_try_coalesce_all_free_memory", lambda: calls.append(real()) or calls[-1]
    )
    LiteGlobal.try_coalesce_all_free_memory()
    assert calls == [0]
    check(network, rng)


def test_tensorrt_cache(tmp_path):
    """There are no engines without a GPU, but the file of them is written where it should be."""
    cache = tmp_path / "tensorrt.cache"
    LiteGlobal.set_tensorrt_cache(str(cache))
    LiteGlobal.dump_tensorrt_cache()
    assert cache.is_file()
    with pytest.raises(LiteArgumentError, match="in an existing folder"):
        LiteGlobal.set_tensorrt_cache(tmp_path / "nowhere" / "cache")


def test_log_level(layer, capfd):
    before = get_log_level()
    assert {one.name: one.value for one in LiteLogLevel} == {"DEBUG": 0, "INFO": 1, "WARN": 2, "ERROR": 3}
    for level in (*LiteLogLevel, before):
        set_log_level(level)
        capfd.readouterr()
        assert get_log_level() is level
        loaded(layer)
        assert ("[DEBUG]" in capfd.readouterr().err) == (level == LiteLogLevel.DEBUG)
    with pytest.raises(LiteArgumentError, match="level"):
        set_log_level(7)


@pytest.fixture(scope="module")
def lacking(layer, tmp_path_factory) -> dict[str, str | None]:
    """What the raw C library answers, without any code of dlinfer's."""
    convolution = tmp_path_factory.mktemp("raw") / "convolution.mge"
    convolution.write_bytes(models.convolution())
    libraries = find(TOOLCHAIN).site_packages.glob("megenginelite/libs/liblite_shared*.so")
    script = Path(__file__).with_name("raw") / "lacking.py"
    command = [sys.executable, "-I", script, next(libraries), layer, convolution]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    return json.loads(done.stdout.splitlines()[-1])


POINTERS = (ctypes.c_void_p(0x1000), ctypes.c_void_p(0x2000))


def test_register_memory_pair_is_lacking(lacking):
    assert "not implement" in lacking["register_memory_pair"]
    with pytest.raises(LiteLackError, match="not implement"):
        LiteGlobal.register_memory_pair(*POINTERS, 64, LiteDeviceType.LITE_CPU)
    with pytest.raises(LiteArgumentError, match="a c_void_p"):
        LiteGlobal.register_memory_pair(0x1000, POINTERS[1], 64, 0)  # pyright: ignore[reportArgumentType]


def test_clear_memory_pair_is_lacking(lacking):
    assert "not implement" in lacking["clear_memory_pair"]
    with pytest.raises(LiteLackError, match="not implement"):
        LiteGlobal.clear_memory_pair(*POINTERS, LiteDeviceType.LITE_CPU)


def test_lookup_physic_ptr_is_lacking(lacking):
    assert "not implement" in lacking["lookup_physic_ptr"]
    with pytest.raises(LiteLackError, match="not implement"):
        LiteGlobal.lookup_physic_ptr(POINTERS[0], LiteDeviceType.LITE_CPU)


def test_whatever_is_said_to_be_lacking_fails_on_the_raw_library(lacking):
    """The list is that of docs/vendors/megengine.md."""
    assert sorted(lacking) == [
        "clear_memory_pair",
        "enable_nhwcd4=1",
        "get_static_memory_alloc_info",
        "graph_opt_level=3",
        "jit_level=1",
        "jit_level=2",
        "lookup_physic_ptr",
        "register_memory_pair",
    ]
    assert all(lacking.values())
