"""The toolchain's chip emulators. Each has a folder with the files that a libsophon folder has.

The emulator of a chip is the chip's ``libcmodel`` with the toolchain's own libbmlib and libbmrt. These libraries find
each other by fixed file names in their folder."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from dlinfer.settings import cache_folder
from dlinfer.toolchain import find, state
from dlinfer.vendor.sophgo.errors import SophgoUnavailableError
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN

ADVICE = "install Sophgo's toolchain with `make toolchains` (or `dlinfer toolchain install sophgo`)"
_CACHE_ADVICE = "set DLINFER_CACHE_DIR to a writable folder"
SHIM = "libshim.so"
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 60

# Name that the libraries open -> file of the toolchain; {chip} is the chip's name.
_LINKS = {
    "libbmrt.so.1.0": "libbmrt.so.1.0",
    "libbmlib.so.0": "libbmlib_bm1684x.so.0",
    "libcmodel.so": "libcmodel_{chip}.so",
    "libcpuop.so": "libcpuop.so",
}


def missing(chip: str) -> str:
    """Return the reason why the emulator of a chip cannot be used; "" if it can be used."""
    installation = state(TOOLCHAIN)
    if not installation.installed:
        return f"Sophgo's toolchain, which has the emulators, cannot be used: {installation.reason}"
    lacking = [file.name for file in _files(chip).values() if not file.exists()]
    return f"the toolchain has no {', '.join(lacking)}" if lacking else ""


def folder(chip: str) -> Path:
    """Return the folder of a chip's emulator, and create it if it is missing. Raises SophgoUnavailableError."""
    what = f"the emulator of {chip}"
    lacking = missing(chip)
    if lacking:
        raise SophgoUnavailableError(what=what, reason=lacking, advice=ADVICE)
    place = cache_folder() / "sophgo" / "emulators" / chip
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, file in _files(chip).items():
            _link(place / name, file)
    except OSError as error:
        reason = f"its folder cannot be created: {error}"
        raise SophgoUnavailableError(what=what, reason=reason, advice=_CACHE_ADVICE) from None
    return place


def without_shim(place: Path) -> str:
    """Return the reason why the emulator in the folder ``place`` has no shim; "" if it has one.

    If the shim is missing, this compiles it first.

    The shim is a few C functions between BMRuntime and bmlib (shim.c). Without it an emulator is only one device. Also
    without it, an emulator whose networks share working memory cannot run networks that need working memory."""
    source = Path(__file__).with_name("shim.c")
    library = place / SHIM
    if library.exists() and library.stat().st_mtime >= source.stat().st_mtime:
        return ""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return f"there is no C compiler ({', '.join(_COMPILERS)})"
    try:
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            output = Path(scratch) / SHIM
            command = [compiler, "-O1", "-shared", "-fPIC", "-o", output, source]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_SECONDS, check=False
            )
            if done.returncode:
                return f"{compiler} failed: {done.stderr.decode(errors='replace').strip()[-200:]}"
            os.replace(output, library)
    except subprocess.TimeoutExpired:
        return f"{compiler} did not end in {_COMPILE_SECONDS} seconds"
    except OSError as error:
        return f"{error}"
    return ""


def _files(chip: str) -> dict[str, Path]:
    libraries = find(TOOLCHAIN).site_packages / "tpu_mlir" / "lib"
    return {name: libraries / file.format(chip=chip) for name, file in _LINKS.items()}


def _link(link: Path, target: Path) -> None:
    """Create a symbolic link, or replace one with another target, even if another process does the same."""
    with contextlib.suppress(OSError):
        if link.readlink() == target:
            return
    with tempfile.TemporaryDirectory(dir=link.parent) as scratch:
        new = Path(scratch) / link.name
        new.symlink_to(target)
        os.replace(new, link)
